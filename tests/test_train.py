"""The loop as a user runs it: real train.py, vLLM and FSDP2, on a random model of 0.1M parameters and the lottery."""

import json
import math
import re
from dataclasses import fields

import pytest
from conftest import close, launch_many, rows

from launch.lib import checkpoint, log
from train import Config

KEYS = """
    step reward_mean reward_std length_mean truncated_frac zero_adv_group_frac kl_rollout_train
    kl_rollout_train_k3 logp_diff_mean logp_diff_max entropy clip_frac_high clip_frac_low ratio_max
    is_weight_mean is_weight_max is_capped_frac first_order_gap routing_agreement routing_flip_frac
    grad_norm lr loss rollout_tokens train_tokens rollout_tokens_per_s train_tokens_per_s seconds
    peak_memory_gb
"""
KEYS = set(re.findall(r"\w+", KEYS))


@pytest.fixture(scope="module")
def lottery(tmp_path_factory, tiny, lottery_file):
    """Flags of a small run on the lottery, and a folder for its output."""
    folder = tmp_path_factory.mktemp("lottery")
    flags = "--steps 1 --prompts-per-step 8 --group-size 4 --max-new-tokens 24 --precision fp32 --lr 1e-3"
    return [*flags.split(), "--model", str(tiny()), "--data", str(lottery_file)], folder


@pytest.fixture(scope="module")
def many(lottery):
    """Runs of one process that differ by some flags: name -> folder."""
    flags, folder = lottery
    variants = {
        "plain": "",
        "small-micro-batches": "--micro-batch-tokens 60",
        "checkpointing": "--activation-checkpointing --micro-batch-tokens 200",
        **{
            f"N{n}-{r}": f"--minibatches {n} --replay {r}"
            for n, r in ((2, "R2"), (4, "R3"), (8, "none"))
        },
        "no-is": "--no-is-correction",
        "no-clip": "--no-clip --minibatches 2",
        "length-norm": "--length-norm",
        "grpo": "--objective grpo --minibatches 2",
        "cispo": "--objective cispo --minibatches 2",
        "fp8": "--rollout-dtype fp8 --replay R3",
        "int4": "--rollout-dtype int4 --temperature 0.8",
        "bf16": "--rollout-dtype bf16",
        **{
            f"still-{r}": f"--rollout-dtype int4 --minibatches 2 --replay {r} --lr 1e-12"
            for r in ("none", "R2", "R3")
        },
        "eval": "--eval-data addition --eval-samples 2 --steps 2 --save-every 1",
    }
    jobs = [[*flags, "--out", str(folder / name), *more.split()] for name, more in variants.items()]
    launch_many(jobs)
    return {name: folder / name for name in variants}


def test_every_flag_runs_and_every_metric_is_there(many):
    """--minibatches 1 2 4 8, replay, each ablation, GRPO, CISPO, rollout dtypes: finite, non-trivial steps.

    Catches a flag that is parsed and then ignored or crashes: what must differ from the plain run does.
    """
    plain = rows(many["plain"])[0]
    for name, out in many.items():
        row = rows(out)[0]
        assert set(row) >= KEYS, KEYS - set(row)
        assert row["grad_norm"] > 0 and math.isfinite(row["loss"]), (name, row)
        assert row["zero_adv_group_frac"] < 1 and row["dropped_responses"] == 0, (name, row)
        assert len(row["routing_agreement"]) == 3, (name, row["routing_agreement"])
    # Responses have about 24 tokens.
    assert rows(many["length-norm"])[0]["grad_norm"] < plain["grad_norm"] / 5
    assert plain["ratio_max"] == 1 and rows(many["N8-none"])[0]["ratio_max"] > 1.01
    assert (
        rows(many["int4"])[0]["kl_rollout_train_k3"]
        > rows(many["fp8"])[0]["kl_rollout_train_k3"]
        > 1e-5
    )
    assert rows(many["int4"])[0]["routing_flip_frac"] > rows(many["bf16"])[0]["routing_flip_frac"]


def test_fp32_engines_agree_in_the_loop(many):
    """In fp32 log pi_old is log mu to 1e-5 and no route differs, in the metrics of a real run; the weights are 1.

    Catches a stale engine, a shift by one between tokens, log-probs or routes, and a temperature on one side only.
    """
    for name in ("plain", "small-micro-batches", "checkpointing", "N2-R2", "N4-R3", "N8-none"):
        row = rows(many[name])[0]
        assert row["logp_diff_max"] < 1e-5, (name, row["logp_diff_max"])
        assert row["routing_agreement"] == [1.0] * 3 and row["routing_flip_frac"] == 0, name
    assert abs(rows(many["plain"])[0]["is_weight_mean"] - 1) < 1e-6


def test_metrics_do_not_depend_on_the_split(many):
    """One micro-batch, a dozen of them, recomputed layers: equal metrics, loss and gradient norm within 1e-5.

    Catches a mean of means, a normalizer per micro-batch, the last micro-batch's numbers.
    """
    for name in ("small-micro-batches", "checkpointing"):
        close(rows(many["plain"])[0], rows(many[name])[0], 1e-5)


def test_pi_and_pi_old_follow_one_rule(many):
    """While theta stays theta_old, pi/pi_old is 1 to 1e-5 in both mini-batches, under every replay mode.

    The engine has int4 weights, so its routes differ, and pi_old of the second mini-batch comes from a pass of its
    own. Catches replay in one pass only (R3 with pi_old under the live router), or routes of another micro-batch.
    """
    for mode in ("none", "R2", "R3"):
        row = rows(many[f"still-{mode}"])[0]
        assert row["routing_flip_frac"] > 0.1 and row["grad_norm"] > 0, (mode, row)
        assert abs(row["ratio_max"] - 1) < 1e-5, (mode, row["ratio_max"])


def test_evaluation_samples_and_export(many):
    """eval.jsonl, samples.jsonl, both checkpoints, and an export that transformers loads.

    Catches an evaluation of stale weights (rows at steps 1 and 2), and an export that is not the trained model.
    """
    out = many["eval"]
    evaluations = rows(out, "eval.jsonl")
    assert [(e["step"], e["n"], e["k"]) for e in evaluations] == [(2, 256, 2)]
    assert {"avg_at_k", "pass_at_k", "length_mean"} <= set(evaluations[0])
    samples = rows(out, "samples.jsonl")
    assert len(samples) == 2 * 4 and {"prompt", "response", "answer", "reward"} <= set(samples[0])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-1", "step-2"]
    record = json.loads((out / "config.json").read_text())
    assert record["versions"]["vllm"].startswith("0.30")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import moe

    model, ours = AutoModelForCausalLM.from_pretrained(out / "hf"), moe.load_pretrained(out / "hf")
    tokens = torch.tensor([AutoTokenizer.from_pretrained(out / "hf").encode("abc 12")])
    logits = ours(tokens)[0] @ ours.lm_head.weight.T
    assert (logits - model(tokens).logits).abs().max() < 1e-5
    start = moe.load_pretrained(record["model"])
    assert not torch.equal(start.lm_head.weight, ours.lm_head.weight), (
        "the export is the model it started from"
    )


def test_rows_survive_any_text(tmp_path):
    """A response with separators that str.splitlines knows and the word NaN is read back as it was; NaN becomes null.

    Catches a file that --resume can't read again, and a sample whose text was taken for a number.
    """
    path = tmp_path / "samples.jsonl"
    odd = {"step": 0, "response": "a\u2028b\u0085c\r\nd NaN, [Infinity]"}
    for row in (odd, {"step": 1, "list": [math.nan, 1.0], "value": math.inf}):
        log.append(path, row)
    path.open("a", encoding="utf-8").write('{"step": 2, "torn')
    checkpoint.rewind(tmp_path, 2)
    assert rows(tmp_path, "samples.jsonl") == [odd, {"step": 1, "list": [None, 1.0], "value": None}]
    checkpoint.rewind(tmp_path, 1)
    assert rows(tmp_path, "samples.jsonl") == [odd]
    for name in ("step-1", "step-3", "step-3.part", "step-best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [p.name for p in checkpoint.saved(tmp_path)] == ["step-1", "step-3"]
    checkpoint.rewind(tmp_path, 0)  # nothing goes with it: moved, not lost
    assert rows(tmp_path, "samples.jsonl.bak") == [odd]
    assert not (tmp_path / "samples.jsonl").exists() and not checkpoint.saved(tmp_path)


def test_help_explains_every_flag(capsys, monkeypatch):
    """--help has a text in words for each field of Config, from the comment behind it, under its heading.

    Catches a field whose comment got lost (by a formatter that breaks the line, say).
    """
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        Config.from_flags(["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    headings = "model and data: sampling: objective: optimization: machine: evaluation: record:"
    places = [text.index(f" {heading}: ") for heading in headings.removesuffix(":").split(": ")]
    assert places == sorted(places)
    for f in fields(Config):
        assert f"--{f.name.replace('_', '-')}" in text and f"(default: {f.default})" in text, f.name
    assert "weight pi/mu; without it pi/pi_old" in text
