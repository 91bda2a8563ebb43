"""What README's "Your own work" says, done: rewards, evaluation, saved rollouts, dense models, curves.

The runs are real, on tiny models, and share one process. What a data file may hold is in tests/test_data.py, flags and
files that are wrong in tests/test_mistakes.py.
"""

import itertools
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import AIME, CHATS, GSM8K, exported, jsonl, launch_many, rows, untimed

import moe
import train
from launch import plan, plot
from launch.lib import log, reward, rollouts

# --- rewards

REWARDS = """
import math

def good(prompt, response, answer, example):
    return len(response) / 100 + (example["answer"] == answer) + (example["level"] - 1)

def raising(prompt, response, answer, example):
    if "3" in response:
        raise KeyError(response)
    return True

def nan(prompt, response, answer, example):
    return math.nan if "3" in response else 0.5

def text(prompt, response, answer, example):
    return "right"

def nothing(prompt, response, answer, example):
    len(response)

def beside(prompt, response, answer, example):
    import neighbour
    return neighbour.share(0)

def three(prompt, response, answer):
    return 1.0

number = 5
"""


def test_own_rewards(tmp_path):
    """A function of (prompt, response, answer, example). What raises or is no finite number stops the run, and the stop
    names the line in the user's file, also if the fault lies in a file beside it, and shows the sample.
    """
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    (tmp_path / "neighbour.py").write_text("def share(n):\n    return 1 / n\n")
    examples = [{"prompt": "Why?", "answer": "42", "level": 3}] * 3

    def score(name: str) -> list[float]:
        return reward.score(f"{file}:{name}", ["a", "b3", "cc"], examples)

    assert score("good") == pytest.approx([3.01, 3.02, 3.02])
    for name in ("raising", "nan"):
        says = rf'(?s)mine.py:{name}: \w+Error: .*"response": "b3"'
        with pytest.raises(log.Stopped, match=says):
            score(name)
    for name, says in {
        "text": "ValueError: the reward is 'right', on",
        "nothing": "ValueError: the reward is None, on",
        "raising": "KeyError: 'b3' .line 9., on",
        "beside": "ZeroDivisionError: .* .line 23., on",
    }.items():
        with pytest.raises(RuntimeError, match=f"mine.py:{name}: {says}"):
            score(name)


def test_a_reward_that_is_none_is_one_line(tmp_path):
    """Missing file or function, wrong signature, a file that fails: a ValueError of one line that names it."""
    file, broken = tmp_path / "mine.py", tmp_path / "broken.py"
    file.write_text(REWARDS)
    broken.write_text("import no_such_module\n")
    exits = tmp_path / "exits.py"
    exits.write_text("raise SystemExit(3)\n")
    for name, says in {
        f"{tmp_path}/none.py:good": "no such file",
        f"{file}:god": "no function god",
        f"{file}:number": "no function number",
        f"{file}:three": "must take prompt, response, answer, example",
        f"{file}": "must be path/to/file.py:function",
        f"{file}:": "must be path/to/file.py:function",
        f"{broken}:good": "the file fails .ModuleNotFoundError",
        f"{exits}:good": "the file fails .SystemExit",
    }.items():
        with pytest.raises(ValueError, match=rf"^--reward .*{says}[^\n]*$"):
            reward.find(name)


# --- evaluation


def test_pass_at_k_is_the_mean_over_all_subsets():
    """Against a loop over every subset of k of n responses, for rewards 0 and 1 and for others; 1 - C(n-c,k)/C(n,k).

    Catches the biased 1 - (1 - p)^k: 4 responses, one right, k = 2: 1 - (3/4)^2 = 7/16, where 1 - C(3,2)/C(4,2) = 1/2.
    """
    generator = np.random.default_rng(0)
    for table in (generator.integers(0, 2, (5, 6)), generator.normal(size=(5, 6))):
        for k in range(1, 7):
            subsets = [table[:, list(s)].max(1) for s in itertools.combinations(range(6), k)]
            assert math.isclose(log.pass_at(table, k), np.mean(subsets), abs_tol=1e-12), k
    assert log.pass_at(np.array([[0, 1, 0, 0]]), 2) == 0.5
    # two problems of 2: variances 1/2 and 0, each over 2 responses: sqrt(1/4 + 0) / 2
    assert log.standard_error(np.array([[0, 1], [1, 1]])) == 0.25


@pytest.fixture(scope="module")
def runs(tiny, chatty, lottery_file, tmp_path_factory):
    """Runs in one process: name -> folder."""
    folder = tmp_path_factory.mktemp("work")
    mixed = folder / "mixed"
    mixed.mkdir()
    sets = {"gsm8k": GSM8K, "aime": AIME, "chat": CHATS}
    mixed = ",".join(str(jsonl(mixed / f"{name}.jsonl", rows)) for name, rows in sets.items())
    (folder / "mine.py").write_text(REWARDS)
    shared = "--prompts-per-step 8 --group-size 4 --max-new-tokens 24 --precision fp32 --lr 1e-3 "
    shared += f"--model {tiny()} --data {lottery_file} --minibatches 2 "
    held = f"--eval-data {lottery_file},{folder}/mixed/aime.jsonl --eval-samples 4 --eval-temperature 0.7 "
    dense = f"--model {tiny(dense=True, tie_word_embeddings=True)} --steps 2"
    variants = {
        "plain": f"--steps 2 --replay R3 --save-rollouts {folder}/rollouts",
        "evaluated": f"--steps 2 --replay R3 --eval-every 1 --save-every 1 {held}",
        "loaded": f"--steps 2 --replay R3 --load-rollouts {folder}/rollouts --data addition",
        "export": f"evaluate --model {folder}/evaluated/hf {held}",
        "again": f"evaluate --model {folder}/evaluated/hf {held}",
        "other-seed": f"evaluate --model {folder}/evaluated/hf {held} --seed 1",
        "checkpoint": f"evaluate --resume {folder}/evaluated/checkpoints/step-1 {held} "
        f"--out {folder}/evaluated",
        "mixed": f"--steps 1 --model {chatty} --data {mixed} --eval-data {mixed} --eval-samples 1",
        "dense": f"{dense} --save-rollouts {folder}/dense-rollouts",
        "dense-loaded": f"{dense} --load-rollouts {folder}/dense-rollouts",
        "dense-part": f"{dense} --steps 1",
    }
    jobs = [
        [*shared.split(), "--out", str(folder / name), *more.split()]
        if not more.startswith("evaluate")
        else ["evaluate", *shared.split(), "--out", str(folder / name), *more.split()[1:]]
        for name, more in variants.items()
    ]
    jobs.append([*jobs[-1], "--steps", "2", "--resume", "auto"])
    launch_many(jobs)
    return {name: folder / name for name in [*variants, "rollouts"]}


def test_evaluation_does_not_change_training(runs):
    """With and without --eval-every 1 at another temperature: equal metrics and weights, bit for bit."""
    plain, evaluated = rows(runs["plain"]), rows(runs["evaluated"])
    assert [untimed(r) for r in plain] == [untimed(r) for r in evaluated]
    assert exported(runs["plain"]) == exported(runs["evaluated"])
    assert evaluated[0]["seconds"]["eval"] > 0 == plain[0]["seconds"]["eval"]


def test_evaluation_rows(runs, lottery_file):
    """eval.jsonl is what eval_problems.jsonl adds up to: avg@k, pass@k, lengths, truncated, by data set.

    Catches the training's length and temperature in evaluation, and problems that lost their order.
    """
    *table, late = rows(
        runs["evaluated"], "eval.jsonl"
    )  # late: launch/evaluate.py, added afterwards
    problems = rows(runs["evaluated"], "eval_problems.jsonl")[: 2 * 43]
    assert [r["step"] for r in [*table, late]] == [1, 2, 1]
    assert table[0]["avg_at_k"] != table[1]["avg_at_k"]
    for row in table:
        assert row["reward"] == "auto"
        mine = [p for p in problems if p["step"] == row["step"]]
        scores, lengths = (np.array([p[name] for p in mine]) for name in ("rewards", "lengths"))
        assert scores.shape == (row["n"], row["k"]) == (43, 4)
        assert math.isclose(scores.mean(), row["avg_at_k"], abs_tol=1e-9)
        assert math.isclose(scores.max(1).mean(), row["pass_at_k"], abs_tol=1e-9)
        assert row["pass_at"].keys() == {"1", "2", "4"} and row["pass_at"]["4"] == row["pass_at_k"]
        assert math.isclose(row["pass_at"]["1"], row["avg_at_k"], abs_tol=1e-9)
        assert math.isclose(scores[:40].mean(), row["data"][str(lottery_file)], abs_tol=1e-9)
        assert lengths.max() == 24 == row["max_new_tokens"] and row["length_mean"] == lengths.mean()
        assert row["truncated_frac"] == sum(p["truncated"] for p in mine) / scores.size
        assert row["temperature"] == 0.7
        for p in mine[:40]:  # the response that is kept is the first, and graded as it was
            assert reward.math_reward(p["response"], p["answer"]) == p["rewards"][0], p


def test_evaluate(runs):
    """launch/evaluate.py on the export repeats the run's last evaluation, twice; a checkpoint its own; another seed is near.

    Catches an evaluation of other weights, of unseeded sampling, and one that trains, resumes or takes back rows.
    """
    *table, late = rows(runs["evaluated"], "eval.jsonl")
    problems = rows(runs["evaluated"], "eval_problems.jsonl")
    names = ("export", "again", "other-seed")
    here = {name: rows(runs[name], "eval.jsonl")[0] for name in names}

    def measured(row: dict) -> dict:
        return {k: v for k, v in row.items() if k not in ("step", "model")}

    assert measured(here["export"]) == measured(here["again"]) == measured(table[1])
    assert measured(late) == measured(table[0])  # of a checkpoint, into the run's own folder
    given = [p["rewards"] for p in problems if p["step"] == 2]
    assert [p["rewards"] for p in rows(runs["export"], "eval_problems.jsonl")] == given
    other, same = here["other-seed"], here["export"]
    assert other["length_mean"] != same["length_mean"]  # other responses
    noise = math.hypot(other["avg_at_k_se"], same["avg_at_k_se"])
    assert noise > 0 and abs(other["avg_at_k"] - same["avg_at_k"]) < 2 * noise, (other, same)
    assert not (runs["export"] / "metrics.jsonl").exists()
    assert len(rows(runs["evaluated"])) == 2 and len(problems) == 3 * 43
    assert len(list((runs["evaluated"] / "checkpoints").iterdir())) == 2


def test_saved_rollouts_make_the_same_update(runs):
    """A run on saved rollouts, without an engine or data: metrics and weights of the run that saved them, bit for bit.

    Catches rounding on the way to the disk, routes or groups that lost their order, and rewards that are lost.
    """
    for saved, loaded in (("plain", "loaded"), ("dense", "dense-loaded")):
        assert [untimed(r) for r in rows(runs[saved])] == [untimed(r) for r in rows(runs[loaded])]
        assert exported(runs[saved]) == exported(runs[loaded])
        assert rows(runs[saved], "samples.jsonl") == rows(runs[loaded], "samples.jsonl")
    record = json.loads((runs["loaded"] / "config.json").read_text())
    assert "rollouts" in record["load_rollouts"]


def test_saved_rollouts_that_do_not_fit_are_refused(runs, tiny, tmp_path):
    """Steps, engines or a model that do not match, and files that are none, are errors that name the file or flag."""
    config = moe.MoEConfig.from_pretrained(tiny())
    folder = tmp_path / "rollouts"
    shutil.copytree(runs["rollouts"], folder)

    def says(expected: str, **changes) -> None:
        c = train.Config(**{"load_rollouts": str(folder), "steps": 2, "model": "m", **changes})
        with pytest.raises(ValueError, match=expected):
            rollouts.check(c, config, None)

    rollouts.check(train.Config(load_rollouts=str(folder), steps=2), config, None)
    says("holds no step 2", steps=3)
    says("--temperature 0.5", temperature=0.5)
    says("holds rollouts already", load_rollouts="", save_rollouts=str(folder))
    config = moe.MoEConfig.from_pretrained(tiny(dense=True, tie_word_embeddings=True))
    says("another model than m")
    shutil.copy(folder / "step-1.1-of-1.npz", folder / "step-1.2-of-2.npz")
    says("no complete step 1")
    (folder / "step-0.1-of-1.npz").write_bytes(b"PK\x03\x04 cut")
    says("step-0.1-of-1.npz: not a saved rollout", steps=1)


def test_formats_in_a_run(runs):
    """GSM8K, AIME and chat rows train and evaluate side by side."""
    row = rows(runs["mixed"], "eval.jsonl")[0]
    assert row["n"] == 8 and [Path(name).stem for name in row["data"]] == ["gsm8k", "aime", "chat"]


# --- dense models


def test_dense_logits_equal_transformers(tiny):
    """Qwen3ForCausalLM, tied and not: logits and gradients of our model against transformers', 1e-5."""
    from transformers import AutoModelForCausalLM

    for tied in (True, False):
        folder = tiny(dense=True, tie_word_embeddings=tied)
        theirs, ours = AutoModelForCausalLM.from_pretrained(folder), moe.load_pretrained(folder)
        tokens = torch.randint(3, 98, (2, 17))
        hidden, routes = ours(tokens)
        head = ours.embed_tokens if tied else ours.lm_head
        logits, wanted = hidden @ head.weight.T, theirs(tokens).logits
        assert (logits - wanted).abs().max() < 1e-5, (logits - wanted).abs().max()
        assert routes.unique().tolist() == [-1]
        logits.square().mean().backward()
        wanted.square().mean().backward()
        named = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            name = name if name.startswith("lm_head") else f"model.{name}"
            assert torch.allclose(p.grad, named[name].grad, rtol=1e-4, atol=1e-6), name
        assert plan.Count.of(ours.config).all == sum(p.numel() for p in ours.parameters())


def test_a_model_by_its_name(tiny, tmp_path, monkeypatch):
    """OWNER/MODEL in the hub's cache becomes its folder, and the run's --model; plan.py takes a dense one, by either."""
    import huggingface_hub

    dense = tiny(dense=True, tie_word_embeddings=True)
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc123")
    shutil.copytree(dense, cached / "snapshots" / "abc123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    c = train.Config(model="some/model")
    assert train.open_model(c).tie_word_embeddings and c.model == str(
        cached / "snapshots" / "abc123"
    )
    with pytest.raises(ValueError, match=r"^--model other/model: no such folder[^\n]*$"):
        train.open_model(train.Config(model="other/model"))
    for name in (str(dense), "some/model"):
        assert plan.main(["--model", name, "--gpus", "1", "--prompt-tokens", "20"]) == 0
    assert plan.main(["--model", "other/model", "--gpus", "1"]) == 2


def test_a_dense_model_trains(runs, tiny):
    """Two steps of tied Qwen3: engine and trainer agree to 1e-5 after the sync, no route is reported, a resume repeats.

    Catches a tied head that the sync does not reach, and responses dropped for the routes that they cannot have.
    """
    whole = rows(runs["dense"])
    assert [untimed(r) for r in whole] == [untimed(r) for r in rows(runs["dense-part"])]
    for row in whole:
        assert row["logp_diff_max"] < 1e-5 and row["dropped_responses"] == 0, row
        assert row["routing_agreement"] == [None] * 3 and row["routing_flip_frac"] is None
        assert row["grad_norm"] > 0
    start = moe.load_pretrained(tiny(dense=True, tie_word_embeddings=True))
    end = moe.load_pretrained(runs["dense"] / "hf")
    assert not torch.equal(start.layers[0].mlp.up_proj.weight, end.layers[0].mlp.up_proj.weight)


# --- curves


def test_curves_and_table(runs, tmp_path, capsys, monkeypatch):
    """plot.py draws avg@k and a line a layer; --table, or no matplotlib, prints the same numbers."""
    picture, pair = tmp_path / "curves.png", [str(runs["evaluated"]), str(runs["dense"])]
    monkeypatch.setattr(sys, "argv", ["plot.py", *pair, "--out", str(picture)])
    plot.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    capsys.readouterr()
    plot.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == pair[0] and printed[1].split()[:3] == ["steps", "reward", "avg@k"], printed
    rewarded, evaluated = (rows(runs["evaluated"], f"{n}.jsonl") for n in ("metrics", "eval"))
    first = printed[2].split()
    assert first[:2] == ["0", f"{rewarded[0]['reward_mean']:.4g}"] and "nan" not in "".join(printed)
    assert printed[3].split()[2] == f"{evaluated[0]['avg_at_k']:.4g}"
    assert plot.series(runs["plain"], "routing_agreement")[1].shape == (2, 3)
    monkeypatch.setattr(sys, "argv", ["plot.py", *pair, "--panels", "seconds"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "--panels seconds" in capsys.readouterr().err
