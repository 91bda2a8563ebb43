"""What the tests share: the repository on the path, one thread, fixed seeds, small models, data, real runs on a lottery.

The lottery is the "math" of every run: the prompt is a few letters, the answer a digit, and a random response's last
number is right about one time in ten, which is enough for advantages that are not zero.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402

PAD, EOS = 0, 1
TOKENS = ["<pad>", "<eos>", "\n", *map(chr, range(32, 127))]  # the vocabulary: 98 tokens
CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, as in Qwen3-30B-A3B
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE, TWO = [sys.executable], [sys.executable, *TORCHRUN]  # process, ranks

TIMED = {"seconds", "rollout_tokens_per_s", "train_tokens_per_s", "peak_memory_gb"}

WORKERS = ROOT / "tests" / "workers"  # programs that tests start


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also the tests that are marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only with --all")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--all"):
        pytest.skip("slow: only with --all")


def needs_cpus() -> None:
    """Skips, on a machine with a GPU, what starts a run or an engine: numbers there are equal to rounding alone, fp32 is
    no setting of vLLM's kernels that anyone tried, and two ranks do not share one GPU."""
    if torch.cuda.is_available():
        pytest.skip(
            "compares fp32 runs, or ranks, to the bit, on CPUs; on a GPU run launch/gpu_check.sh"
        )


def launch(command: list[str], ok: bool = True) -> subprocess.CompletedProcess:
    """A real process, with what it printed; unless told otherwise it must end well."""
    needs_cpus()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False
    )
    assert not ok or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def launch_many(jobs: list[list[str]], python: list[str] = ONE) -> None:
    """The runs with these flags, one after the other in one process (or two ranks), which starts once for all."""
    launch([*python, str(WORKERS / "many.py"), json.dumps(jobs)])


def rows(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (out / name).open(encoding="utf-8")]


def exported(out: Path) -> dict[str, bytes]:
    """The bytes of a run's exported weights."""
    return {p.name: p.read_bytes() for p in (out / "hf").glob("*.safetensors")}


def untimed(row: dict) -> dict:
    return {k: v for k, v in row.items() if k not in TIMED}


def close(a: dict, b: dict, tolerance: float) -> None:
    """Every untimed metric of two rows, lists too, within a relative or absolute tolerance."""
    for key in untimed(a):
        for x, y in zip(
            *([r[key]] if not isinstance(r[key], list) else r[key] for r in (a, b)), strict=True
        ):
            assert x == y or math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance), (key, x, y)


# Rows as the common sets have them.
GSM8K = [
    {"question": "May: 24 clips. How many in all?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "12 an hour, 50 minutes?", "answer": "12*50/60 = 10\n#### 10"},
]
AIME = [
    {"id": 60, "problem": r"Find $\sqrt{12}$.", "answer": r"2\sqrt{3}", "solution": "Easy."},
    {"problem": r"Compute $\frac{1}{2}+1$.", "solution": r"It is $\boxed{\frac{3}{2}}$."},
    {"problem": "Least n?", "answer": 204, "year": 2024},
]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
        ],
        "ground_truth": "4",
    },
    {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": r"\boxed{2}"},
        ]
    },
    {"prompt": [{"role": "user", "content": "3+3?"}], "reward_model": {"ground_truth": "6"}},
]

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


def jsonl(path: Path, examples: list[dict]) -> Path:
    path.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    return path


def save_model(folder: Path, seed: int = 0, **changes) -> Path:
    """Writes a folder with transformers' own Qwen3-MoE, or Qwen3 (dense=True): CONFIG with `changes`, random weights.

    Of unit gain: logits have a spread of about 1. Routers prefer some experts, and norms are not ones, so that a
    parameter that is left out, swapped or transposed shows.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = "Qwen3" if changes.pop("dense", False) else "Qwen3Moe"
    config = {k: v for k, v in CONFIG.items() if kind == "Qwen3Moe" or k not in EXPERTS}
    config = getattr(transformers, f"{kind}Config")(**{**config, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5, generator=generator)
            else:
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of single characters, ids in the order of TOKENS; transformers and vLLM load it."""
    from tokenizers import Tokenizer, decoders, models

    # Byte-pair encoding without a single merge leaves characters.
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(TOKENS[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names |= {"eos_token": TOKENS[EOS], "pad_token": TOKENS[PAD]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def response_logp(model, tokens, lengths, mask, experts=None):
    """log p of response tokens (B, T), 0 elsewhere: the hidden state of t - 1 predicts token t."""
    hidden, _ = model(tokens, lengths, experts)
    at = mask[:, 1:]
    logp, _ = model.logprobs(hidden[:, :-1][at], tokens[:, 1:][at])
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


@pytest.fixture(autouse=True)
def repeatable():
    """One thread and one seed for every test, whatever ran before it."""
    torch.set_num_threads(1)
    torch.manual_seed(2026)


@pytest.fixture(scope="session")
def lottery_file(tmp_path_factory) -> Path:
    """40 prompts of one to seven letters, whose answer is a digit: right by luck, one time in ten."""
    lines = [{"prompt": chr(97 + i % 26) * (1 + i % 7), "answer": i % 10} for i in range(40)]
    return jsonl(tmp_path_factory.mktemp("lottery") / "data.jsonl", lines)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(seed=0, **changes of CONFIG) -> folder with config.json, model.safetensors and tokenizer. Read only: equal calls share it."""
    made = {}

    def make(**arguments) -> Path:
        key = json.dumps(arguments, sort_keys=True)
        if key not in made:
            with torch.random.fork_rng():  # a test's numbers do not depend on who made the folder
                made[key] = save_tokenizer(save_model(tmp_path_factory.mktemp("tiny"), **arguments))
        return made[key]

    return make


@pytest.fixture(scope="session")
def chatty(tiny, tmp_path_factory) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(tiny(), folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT}))
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory, tiny, lottery_file):
    """Flags of a short run, and a folder whose begun/ has finished one step of it. Others start from copies of that."""
    folder = tmp_path_factory.mktemp("run")
    flags = "--prompts-per-step 4 --group-size 4 --max-new-tokens 16 --precision fp32 --lr 1e-4"
    flags += " --save-every 1 --resume auto"
    flags = [*flags.split(), "--model", str(tiny()), "--data", str(lottery_file)]
    launch([*ONE, "train.py", *flags, "--steps", "1", "--out", str(folder / "begun")])
    return flags, folder
