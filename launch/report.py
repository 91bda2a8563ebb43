"""What a step leaves behind: one line on the screen, a row of metrics.jsonl, a few samples (imported by train.py).

Every number is the whole batch's, over all mini-batches, micro-batches and ranks. README's table defines each one.
"""

import importlib.metadata
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import loss
import replay
from launch import guard


def announce(model: torch.nn.Module, c, acc: Accelerator) -> None:
    """The run's first line, and OUT/config.json: every flag, the versions and the commit."""
    assert all(isinstance(p, DTensor) for p in model.parameters()), "FSDP2 is off"
    count, ranks = sum(p.numel() for p in model.parameters()), acc.num_processes
    tokens = c.prompts_per_step * c.group_size * c.max_new_tokens
    rounded = c.engine_dtype == "int4" or (c.engine_dtype == "fp8" and acc.device.type != "cuda")
    copies = f" in {c.hsdp_replicas} copies" if c.hsdp_replicas > 1 else ""
    acc.print(
        f"fsdp2 on {ranks} {acc.device.type} rank{'s' * (ranks > 1)}{copies}, {c.precision} compute, fp32 masters, {count:,} parameters; "
        f"vLLM {c.engine_dtype}{' (emulated)' if rounded else ''}; up to {tokens:,} new tokens a step"
    )
    acc.init_trackers("minirl", config=vars(c))
    if acc.is_main_process:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # there is no git
            commit = ""
        names = ("torch", "accelerate", "transformers", "safetensors", "numpy")
        versions = {name: importlib.metadata.version(name) for name in names}
        vllm = sys.modules.get("vllm")  # its package has another name on a CPU
        versions["vllm"] = vllm and vllm.__version__  # none: --load-rollouts
        record = vars(c) | {"ranks": ranks, "git_commit": commit, "versions": versions}
        path = Path(c.out) / "config.json"
        with guard.writing(path):
            path.write_text(json.dumps(record, indent=2) + "\n")


def measure(micro, logp: Tensor, entropy: Tensor, stats: loss.Stats) -> dict:
    """What a step's line is made of, in forms that add up over micro-batches and ranks."""
    inputs = F.pad(micro.mask[:, 1:], (0, 1))  # the positions that predict a response token
    stats = stats | loss.discrepancy_stats(micro.logp_old, micro.logp_rollout, entropy, micro.mask)
    gaps = loss.first_order_gap(logp, micro.logp_rollout, micro.mask)[micro.mask.any(1)]
    ours, theirs = micro.experts_old, micro.experts_rollout
    theirs = torch.full_like(ours, -1) if theirs is None else theirs  # nothing to compare with
    return {
        "stats": {k: v.cpu() for k, v in stats.items()},
        "gaps": gaps.tolist(),
        "agreement": replay.agreement_counts(theirs, ours, inputs).cpu(),
    }


def summarize(batch, adv, minibatches, dropped, c, acc: Accelerator) -> dict:
    """The step's metrics over all mini-batches and ranks. README's table says what each one means."""
    response = zip(
        batch.group_ids,
        batch.rewards,
        batch.failed,
        map(len, batch.logp_rollout),
        batch.truncated,
        adv.tolist(),
        map(len, batch.tokens),
        strict=True,
    )
    mine = [] if acc.process_index % c.rollout_tp else list(response)  # of an engine, once
    parts = [(m.loss, m.grad_norm, m.measured) for m in minibatches]
    rows, parts, dropped = zip(*gather_object([(mine, parts, dropped)]), strict=True)  # over ranks
    group, reward, failed, length, truncated, adv, tokens = np.array(sum(rows, []), float).T
    losses, norms, measured = zip(*sum(parts, []), strict=True)
    measured = sum(measured, [])
    gaps = sum((m["gaps"] for m in measured), [])
    hits, out_of = sum(m["agreement"] for m in measured)
    *agreement, flipped = (hits / out_of).tolist()
    stats = loss.merge_stats([m["stats"] for m in measured])
    return {
        "reward_mean": reward.mean(),
        "reward_std": reward.std(),
        "reward_errors": int(failed.sum()),
        "length_mean": length.mean(),
        "truncated_frac": truncated.mean(),
        "zero_adv_group_frac": 1 - len(set(group[adv != 0])) / len(set(group)),
        "dropped_responses": sum(dropped) // c.rollout_tp,
        "skipped_updates": sum(bool(m.skipped) for m in minibatches),
        **{k: float(v) for k, v in stats.items() if k != "tokens"},
        "first_order_gap": float(np.median(gaps)),
        "first_order_gap_max": max(gaps),
        "routing_agreement": agreement,
        "routing_flip_frac": flipped,
        "grad_norm": float(np.nanmean(norms)) if np.isfinite(norms).any() else math.nan,
        "loss": sum(losses) / c.minibatches,
        "rollout_tokens": int(length.sum()),
        "train_tokens": int(tokens.sum()),
    }


def write_step(
    step, examples, batch, adv, minibatches, dropped, seconds, c, acc: Accelerator, bar: tqdm
) -> dict:
    """One line, metrics.jsonl, and best and worst response to the first two prompts in samples.jsonl."""
    m = {
        "step": step,
        **summarize(batch, adv, minibatches, dropped, c, acc),
        "lr": minibatches[-1].lr,
    }
    m["rollout_tokens_per_s"] = m["rollout_tokens"] / seconds["rollout"]
    m["train_tokens_per_s"] = m["train_tokens"] / (seconds["old"] + seconds["update"])
    m["seconds"] = {k: seconds[k] for k in ("sync", "rollout", "old", "update", "eval", "save")}
    m["peak_memory_gb"] = peak_memory_gb()
    acc.log({k: v for k, v in m.items() if isinstance(v, int | float)}, step=step)
    if not acc.is_main_process:
        return m
    append(Path(c.out) / "metrics.jsonl", m)
    write_samples(step, examples, batch, c)
    line = "reward {reward_mean:.3f}  KL {kl_rollout_train:+.1e}  k3 {kl_rollout_train_k3:.1e}  entropy {entropy:.3f}"
    line += "  flips {routing_flip_frac:6.1%}  length {length_mean:.0f}  tok/s {rollout_tokens_per_s:5.0f}"
    bar.set_postfix_str(
        "reward {reward_mean:.2f}, KL {kl_rollout_train:.0e}, {rollout_tokens_per_s:.0f} tok/s".format(
            **m
        )
    )
    clipped, total = m["clip_frac_high"] + m["clip_frac_low"], sum(seconds.values())
    wrong = f"  reward errors {m['reward_errors']}" if m["reward_errors"] else ""
    if m["skipped_updates"]:
        what = " and ".join(sorted({z.skipped for z in minibatches} - {""}))
        wrong += f"  left out {m['skipped_updates']} updates: {what} not finite"
    bar.write(f"step {step:4d}  {line.format(**m)}  clip {clipped:.4f}{wrong}  {total:.1f} s")
    return m


def write_samples(step: int, examples: list[dict], batch, c) -> None:
    """The best and the worst response to the first two prompts."""
    for g in sorted(set(batch.group_ids.tolist()))[:2]:
        rows = sorted(np.flatnonzero(batch.group_ids == g), key=lambda b: batch.rewards[b])
        prompt, answer = examples[g]["prompt"], examples[g]["answer"]
        for b in (rows[-1], rows[0]):
            sample = {"step": step, "reward": float(batch.rewards[b]), "prompt": prompt}
            sample |= {"response": batch.texts[b], "answer": answer}
            append(Path(c.out) / "samples.jsonl", sample)


def progress(items: list, what: str, acc: Accelerator) -> tqdm:
    """The items, with a bar on the main rank's terminal that goes when they are done."""
    return tqdm(items, desc=what, leave=False, disable=None if acc.is_main_process else True)


def peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def append(path: Path, row: dict) -> None:
    """One JSON line, flushed; NaN and infinity, which JSON lacks, become null."""

    def finite(v):
        if isinstance(v, dict | list):
            return (
                {k: finite(x) for k, x in v.items()}
                if isinstance(v, dict)
                else [finite(x) for x in v]
            )
        return None if isinstance(v, float) and not math.isfinite(v) else v

    with guard.writing(path), open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
