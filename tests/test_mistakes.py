"""Users' mistakes end in one line that names the flag or file, with code 2, before an engine starts; nothing is lost.

One real process meets them all in train.main, a fork a case, so that torch is imported once. Each group of cases gives
what the line must say -> the flags that are wrong; files are made for it.
"""

import json
from pathlib import Path
from shutil import copytree

import pytest
from conftest import ONE, WORKERS, launch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import train
from launch.lib import flags as flags_

FLAGS = {
    "--steps 0: must be at least 1": "--steps 0",
    "--steps: invalid int value: 'x'": "--steps x",
    "--prompts-per-step -4: must be at least 1": "--prompts-per-step -4",
    "--group-size 1: must be at least 2": "--group-size 1",
    "--max-new-tokens 0: must be at least 1": "--max-new-tokens 0",
    "--max-new-tokens 300: leaves no room for a prompt": "--max-new-tokens 300",
    "--micro-batch-tokens 0: must be at least 1": "--micro-batch-tokens 0",
    "--minibatches 3: does not divide --prompts-per-step 4": "--minibatches 3",
    "--minibatches 8: does not divide --prompts-per-step 4": "--minibatches 8",
    "--seed -1: must be at least 0": "--seed -1",
    "--temperature 0.0: must be positive": "--temperature 0",
    "--temperature inf: must be finite": "--temperature inf",
    "--temperature 0.001: is below 0.01": "--temperature 0.001",
    "--lr -1.0: must be positive": "--lr -1",
    "--lr nan: must be positive": "--lr nan",
    "--lr inf: must be below 1": "--lr inf",
    "--max-grad-norm 0.0: must be positive": "--max-grad-norm 0",
    "--is-cap 0.0: must be positive": "--is-cap 0",
    "--eps-low 1.5: must be at most 1": "--eps-low 1.5",
    "--rollout-memory 1.5: must be below 1": "--rollout-memory 1.5",
    "--rollout-tp 2: must divide the 1 ranks": "--rollout-tp 2",
    "--hsdp-replicas 2: 1 ranks allow [1]": "--hsdp-replicas 2",
    "--rollout-dtype: invalid choice: 'fp16'": "--rollout-dtype fp16",
    "--replay: invalid choice: 'r3'": "--replay r3",
    "--replay R2: is none with --minibatches 1": "--replay R2",
    "--clip False: is nothing that grpo knows": "--objective grpo --no-clip",
    "--is-correction False: is nothing that grpo knows": "--objective grpo --no-is-correction",
    "--length-norm True: is nothing that cispo knows": "--objective cispo --length-norm",
    "--prompt-template Q: must hold {prompt}": "--prompt-template Q",
    "unrecognized arguments: --group 4": "--group 4",  # no abbreviations
    "unrecognized arguments: --replya R3": "--replya R3",
}

MISSING = {  # the line -> what is not installed, and the flags that need it
    "vLLM is not installed; launch/setup.sh installs it": ("vllm", ""),
    "--log-with wandb: is not installed": ("wandb", "--log-with wandb"),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def models(here: Path, model: Path, dense: Path) -> dict[str, str]:
    """config.json, tokenizer and weights of --model."""

    def configured(name: str, drop: str = "", **changes) -> str:
        file = copytree(model, here / name) / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if not drop or drop not in k}))
        return f"--model {here}/{name}"

    (copytree(model, here / "text") / "config.json").write_text("not json")
    (copytree(model, here / "tokenizer") / "tokenizer.json").write_text("{")
    copytree(model, here / "no-tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (here / "no-tokenizer" / file).unlink()
    cut(copytree(model, here / "cut") / "model.safetensors")
    no_experts = {"num_experts": None, "num_local_experts": None}
    return {
        "nowhere/config.json: [Errno 2] No such file": "--model nowhere",
        "--model no-such/model: no such folder": "--model no-such/model",
        f"{here}/text/config.json: Expecting value": f"--model {here}/text",
        "llama/config.json: architectures is ['LlamaForCausalLM']": configured(
            "llama", architectures=["LlamaForCausalLM"]
        ),
        "no-theta/config.json: no value for rope_theta": configured("no-theta", drop="rope"),
        "no-experts/config.json: no value for num_experts": configured("no-experts", **no_experts),
        "bias/config.json: attention_bias = True": configured("bias", attention_bias=True),
        "is (32, 64), by config.json (16, 64)": configured("narrow", moe_intermediate_size=16),
        f"{here}/cut/model.safetensors: weights cannot be read": f"--model {here}/cut",
        f"{here}/tokenizer: no usable tokenizer": f"--model {here}/tokenizer",
        f"{here}/no-tokenizer: holds no tokenizer": f"--model {here}/no-tokenizer",
        f"--replay R2: {dense} is dense": f"--model {dense} --replay R2 --minibatches 2",
        f"--replay R3: {dense} is dense": f"--model {dense} --replay R3",
    }


def data(here: Path) -> dict[str, str]:
    """The file of --data."""
    for name, text in {
        "broken": '{"prompt": "a", "answer": 1}\n{"prompt"\n',
        "no-answer": '{"prompt": "a"}\n',
        "empty": "\n\n",
        "long": f'{{"prompt": "{"a" * 300}", "answer": 1}}',
    }.items():
        (here / f"{name}.jsonl").write_text(text)
    return {
        f"{here}/none.jsonl: cannot be read": f"--data {here}/none.jsonl",
        f"{here}/broken.jsonl:2: not JSON": f"--data {here}/broken.jsonl",
        f"{here}/no-answer.jsonl:1: needs an object": f"--data {here}/no-answer.jsonl",
        f"{here}/empty.jsonl: no examples": f"--data {here}/empty.jsonl",
        f"{here}/long.jsonl: no prompt fits": f"--data {here}/long.jsonl",
    }


def checkpoints(here: Path, begun: Path, other: Path) -> dict[str, str]:
    """--out and --resume. A checkpoint that is cut off, that lacks a file or a part of a tensor, or that is another
    model's, is never half-loaded."""
    first = "shard-00001-model-00002-of-00004.safetensors"

    def spoiled(name: str, file: str = first) -> Path:
        return copytree(begun, here / name) / "checkpoints" / "step-1" / file

    cut(spoiled("torn"))
    spoiled("part").unlink()
    spoiled("no-record", "run.json").write_text("{")
    spoiled("no-file", "run.json").unlink()
    half = spoiled("half")
    with safe_open(half, "pt") as f:
        tensors, about = load_file(half), f.metadata()
    name = next(n for n in tensors if n.endswith("down_proj"))
    places = json.loads(about["DCP_SHARDING_INFO"])
    places[name]["saved_offsets"][0] = 4  # as if another rank had had the first four experts
    about["DCP_SHARDING_INFO"] = json.dumps(places)
    save_file({n: t[4:] if n == name else t for n, t in tensors.items()}, half, about)
    return {
        f"--out {here}/file/x: cannot be written": f"--out {here}/file/x",
        f"--out {begun}: holds a run; add --resume auto": f"--out {begun} --resume=",
        "belongs to another": f"--out {begun} --resume {here}/part/checkpoints/step-1",
        f"--resume {here}/file: not a checkpoint": f"--resume {here}/file",
        "--resume nowhere: not a checkpoint": "--resume nowhere",
        f"torn/checkpoints/step-1/{first}: cannot be read": f"--out {here}/torn",
        "part/checkpoints/step-1: weight.layers.0.": f"--out {here}/part",
        f"half/checkpoints/step-1: parts of {name} are missing": f"--out {here}/half",
        "no-record/checkpoints/step-1: not a checkpoint": f"--out {here}/no-record",
        "no-file/checkpoints/step-1: not a checkpoint": f"--out {here}/no-file",
        "layers.2.input_layernorm.weight is [64], the model's is None": f"--model {other} --out {begun}",
    }


def extras(here: Path, lottery: Path) -> dict[str, str]:
    """Rewards, evaluation, saved rollouts."""
    (here / "mine.py").write_text("")
    (here / "rollouts").mkdir()
    (here / "rollouts" / "step-0.1-of-1.npz").write_text("")
    return {
        "--reward mine: must be path/to/file.py:function": "--reward mine",
        f"--reward {here}/mine.py:none: no function none": f"--reward {here}/mine.py:none",
        "--eval-every 1: needs --eval-data": "--eval-every 1",
        "--eval-temperature -1.0: must be positive": "--eval-temperature -1",
        "--load-rollouts nowhere: holds no step 0": "--load-rollouts nowhere",
        "nowhere: without --eval-data": f"--load-rollouts nowhere --eval-data {lottery}",
        "rollouts: holds rollouts already": f"--save-rollouts {here}/rollouts --resume=",
        f"--save-rollouts {here}/file/x: cannot be": f"--save-rollouts {here}/file/x",
    }


def test_shared_engines_refuse_expandable_segments(monkeypatch):
    """vLLM's all-reduce exports the buffers of CUDA graphs by IPC, which refuses memory of that kind: one line instead
    of an engine that ends without a word. Catches the variable under either name; a rank by itself may have it.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
            flags_.check(train.Config(), 8, 8)
            with pytest.raises(ValueError, match=r"^--rollout-tp 2: not with PYTORCH_ALLOC_CONF"):
                flags_.check(train.Config(rollout_tp=2), 8, 8)
            patch.setenv(name, "expandable_segments:False")
            flags_.check(train.Config(rollout_tp=2), 8, 8)


GROUPS = ("flags", "not installed", "models", "data", "checkpoints", "extras")


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def ended(run, tiny, lottery_file, tmp_path_factory):
    """Group -> (what the line must say, the flags, exit code, stderr) of each case; the files before and after all."""
    flags, folder = run
    here = tmp_path_factory.mktemp("mistakes")
    (here / "file").write_text("")
    begun = copytree(folder / "begun", here / "begun")
    model, dense = tiny(), tiny(dense=True, tie_word_embeddings=True)
    missing = {says: f"{wrong} --out {here}/none" for says, (_, wrong) in MISSING.items()}
    other = checkpoints(here, begun, tiny(num_hidden_layers=2))
    made = models(here, model, dense), data(here), other, extras(here, lottery_file)
    groups = dict(zip(GROUPS, (FLAGS, missing, *made), strict=True))
    cases = [(group, *case) for group, of_it in groups.items() for case in of_it.items()]
    jobs = []
    for _, says, wrong in cases:
        hidden = MISSING[says][0] if says in MISSING else ""
        jobs.append([hidden, [*flags, "--out", f"{here}/new", *wrong.split()]])
    (here / "jobs").write_text(json.dumps(jobs))
    before = contents(here)
    done = launch([*ONE, str(WORKERS / "mains.py"), str(here / "jobs")])
    results = {group: [] for group in GROUPS}
    for (group, *case), end in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        results[group].append((*case, *end))
    return results, before, contents(here), here


@pytest.mark.parametrize("group", GROUPS)
def test_a_mistake_ends_in_one_line_and_code_2(ended, group):
    """The line, nothing beside it, and code 2. Catches a traceback, a default in place of an error, a mistake that is
    found only after minutes of start-up, and one that is reported as another.
    """
    for says, wrong, code, error in ended[0][group]:
        assert code == 2, (wrong, code, error)
        assert error.count("\n") == 1 and error.startswith("train.py: error: "), (wrong, error)
        assert says in error, (says, error)


def test_nothing_is_lost_by_a_mistake(ended):
    """Every file that was there is as it was, a finished run among them; what is new lies in the --out of a new run, of
    which there is none without vLLM.
    """
    _, before, after, here = ended
    assert sum(p.is_relative_to(here / "begun") for p in before) > 10
    assert before.items() <= after.items()
    assert {p.parent for p in after.keys() - before.keys()} == {here / "new"}
    assert not (here / "none").exists()
