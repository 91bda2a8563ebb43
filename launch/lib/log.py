"""What a run leaves behind: lines on the screen, metrics.jsonl, samples.jsonl, eval.jsonl.

Every number is the whole batch's, over all engines and ranks. Also here: the faults that a run
reports in one line (Stopped), and the judgement of each step's metrics (Watch).
"""

import importlib.metadata
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from tqdm import tqdm

PHASES = ("sync", "rollout", "old", "update", "eval", "save")
BAD_STEPS = 3  # in a row with a loss or gradient that is not finite; then the run stops

STEP_LINE = (
    "step {step:4d}  reward {reward_mean:.3f}  KL {kl_rollout_train:+.1e}  "
    "k3 {kl_rollout_train_k3:.1e}  entropy {entropy:.3f}  flips {routing_flip_frac:6.1%}  "
    "length {length_mean:.0f}  tok/s {rollout_tokens_per_s:5.0f}  clip {clipped:.4f}{skipped}"
    "  {total:.1f} s"
)
BAR_LINE = "reward {reward_mean:.2f}, KL {kl_rollout_train:.0e}, {rollout_tokens_per_s:.0f} tok/s"
EVAL_LINE = (
    "eval at step {step}: avg@{k} {avg_at_k:.3f} +- {avg_at_k_se:.3f}, pass@{k} {pass_at_k:.3f}, "
    "{n} problems, length {length_mean:.0f}, truncated {truncated_frac:.1%}"
)


# --- faults


class Stopped(RuntimeError):
    """A run that cannot go on, for the reason in its text: one line, exit code 1."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a fault while `path` is written (a full disk, say) into Stopped, which names it."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        failures = getattr(error, "failures", {})  # rank -> (exception, where)
        why = "; ".join({str(failure[0]) for failure in failures.values()}) or str(error)
        raise Stopped(f"{path}: cannot be written ({why})") from error


class Watch:
    """Judges each step's metrics, before a checkpoint is written; raises Stopped.

    An engine whose weights are stale or half-loaded samples from another policy than the one that
    is trained. Log-probs are then nats apart: KL[mu || pi_old] (k3) is above 1 nat a token, or
    above 0.2 and 20 times what it was. (In the recorded runs of launch/figures.py, with 4-bit
    rollout weights, the largest mean of 8 updates is 0.16.)
    """

    ALWAYS, FLOOR, RISE = 1.0, 0.2, 20

    def __init__(self):
        self.bad_steps = 0
        self.levels = deque(maxlen=20)  # KL of the last steps

    def check(self, row: dict) -> None:
        """row: a step's row of metrics.jsonl, the same on every rank."""
        kl = row["kl_rollout_train_k3"]
        level = statistics.median(self.levels or [math.inf])
        if kl > self.ALWAYS or kl > max(self.FLOOR, self.RISE * level):
            before = f"its median was {level:.1g}" if self.levels else "in the first step"
            raise Stopped(
                f"step {row['step']}: KL[mu||pi_old] is {kl:.2g} nats a token, {before}: vLLM does "
                "not sample from the weights that are trained. Likely: a sync that loaded part of "
                "them or none (another vLLM version?), log-probs of other sampling settings, a "
                "model folder that changed during the run; with fp8 or int4 rollouts, a policy "
                "that has collapsed (its reward tells)"
            )
        if math.isfinite(kl):  # else the update was skipped
            self.levels.append(kl)
        self.bad_steps = self.bad_steps + 1 if row["skipped_updates"] else 0
        if self.bad_steps >= BAD_STEPS:
            raise Stopped(
                f"step {row['step']}: {BAD_STEPS} steps in a row with a loss or gradient that is "
                "not finite; their updates were left out"
            )


# --- a training step


def announce(model: torch.nn.Module, c, acc: Accelerator) -> None:
    """The run's first line, and OUT/config.json: every flag, the versions and the commit."""
    assert all(isinstance(p, DTensor) for p in model.parameters()), "FSDP2 is off"
    count = sum(p.numel() for p in model.parameters())
    ranks = acc.num_processes
    tokens = c.prompts_per_step * c.group_size * c.max_new_tokens
    emulated = c.engine_dtype == "int4" or (c.engine_dtype == "fp8" and acc.device.type != "cuda")
    copies = f" in {c.hsdp_replicas} copies" if c.hsdp_replicas > 1 else ""
    acc.print(
        f"fsdp2 on {ranks} {acc.device.type} rank{'s' * (ranks > 1)}{copies}, {c.precision} "
        f"compute, fp32 masters, {count:,} parameters; vLLM {c.engine_dtype}"
        f"{' (emulated)' * emulated}; up to {tokens:,} new tokens a step"
    )
    acc.init_trackers("minirl", config=vars(c))
    if acc.is_main_process:
        record = vars(c) | {"ranks": ranks, "git_commit": commit(), "versions": versions()}
        path = Path(c.out) / "config.json"
        with writing(path):
            path.write_text(json.dumps(record, indent=2) + "\n")


def commit() -> str:
    """The git commit of this repository, "" if there is none to be had."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return ""


def versions() -> dict[str, str | None]:
    names = ("torch", "accelerate", "transformers", "safetensors", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    vllm = sys.modules.get("vllm")  # its package has another name on a CPU
    found["vllm"] = vllm.__version__ if vllm else None  # None with --load-rollouts
    return found


def write_step(row: dict, skipped: set[str], c, acc: Accelerator, bar: tqdm) -> None:
    """Adds the speeds to a step's row, and writes it: to metrics.jsonl, and as a line.

    `skipped` says what was not finite: "loss" or "gradient".
    """
    seconds = row["seconds"]
    row["rollout_tokens_per_s"] = row["rollout_tokens"] / seconds["rollout"]
    row["train_tokens_per_s"] = row["train_tokens"] / (seconds["old"] + seconds["update"])
    acc.log({k: v for k, v in row.items() if isinstance(v, int | float)}, step=row["step"])
    if not acc.is_main_process:
        return
    append(Path(c.out) / "metrics.jsonl", row)
    bar.set_postfix_str(BAR_LINE.format(**row))
    words = ""
    if skipped:
        words = f"  left out {row['skipped_updates']} updates: {' and '.join(sorted(skipped))} not"
        words += " finite"
    if row["zero_adv_group_frac"] == 1:
        words += "  nothing to learn: in each group all rewards are equal"
    clipped = row["clip_frac_high"] + row["clip_frac_low"]
    total = sum(seconds.values())
    bar.write(STEP_LINE.format(**row, clipped=clipped, skipped=words, total=total))


def write_samples(step: int, examples: list[dict], batch, c, acc: Accelerator) -> None:
    """The best and the worst response to the first two prompts, in samples.jsonl."""
    if not acc.is_main_process:
        return
    for group in np.unique(batch.group_ids)[:2]:
        rows = np.flatnonzero(batch.group_ids == group)
        rows = sorted(rows, key=lambda b: batch.rewards[b])
        for b in (rows[-1], rows[0]):
            sample = {"step": step, "reward": float(batch.rewards[b])}
            sample["prompt"] = examples[group]["prompt"]
            sample["response"] = batch.texts[b]
            sample["answer"] = examples[group]["answer"]
            append(Path(c.out) / "samples.jsonl", sample)


# --- an evaluation


def pass_at(rewards: np.ndarray, k: int) -> float:
    """pass@k from n >= k responses to each problem, unbiased: rewards (problems, n).

    Of all subsets of k responses, the mean of the best reward. The i-th smallest of n is the best
    of C(i - 1, k - 1) subsets. With rewards 0 and 1, and c right responses, this is
    1 - C(n - c, k)/C(n, k) (Chen et al. 2021, arXiv 2107.03374).
    """
    n = rewards.shape[1]
    share = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return float((np.sort(rewards, axis=1) @ share).mean())


def standard_error(rewards: np.ndarray) -> float:
    """Of avg@k, if the same problems are answered again: rewards (problems, k); NaN for k = 1."""
    problems, k = rewards.shape
    if k < 2:
        return math.nan
    return float(np.sqrt((rewards.var(1, ddof=1) / k).sum()) / problems)


def write_evaluation(step: int, answers, examples: list[dict], c, acc: Accelerator, layout) -> None:
    """From k responses to each example: a row of eval.jsonl, one a problem of eval_problems.jsonl.

    `answers` are this engine's. One rank of it reports them.
    """
    k = c.eval_samples
    lengths = [len(logp) for logp in answers.logp_rollout]
    first = [text if b % k == 0 else "" for b, text in enumerate(answers.texts)]
    columns = (answers.rewards.tolist(), lengths, answers.truncated.tolist(), first)
    rows = gather_object(list(zip(*columns, strict=True)) if layout.member == 0 else [])
    if not acc.is_main_process:
        return

    numbers = np.array([row[:3] for row in rows], float).reshape(-1, k, 3)
    reward, length, truncated = numbers.transpose(2, 0, 1)  # (problems, k) each
    source = np.array([example["data"] for example in examples])
    row = {"step": step, "n": len(reward), "k": k, "avg_at_k": reward.mean()}
    row |= {"avg_at_k_se": standard_error(reward), "pass_at_k": pass_at(reward, k)}
    row["pass_at"] = {str(2**i): pass_at(reward, 2**i) for i in range(k.bit_length())}
    row |= {"length_mean": length.mean(), "truncated_frac": truncated.mean()}
    row["data"] = {name: reward[source == name].mean() for name in dict.fromkeys(source)}
    row |= {"temperature": c.eval_temperature or c.temperature, "seed": c.seed}
    row |= {"max_new_tokens": c.max_new_tokens, "model": c.model, "reward": c.reward}
    acc.log({f"eval_{name}": row[name] for name in ("avg_at_k", "pass_at_k")}, step=step - 1)
    append(Path(c.out) / "eval.jsonl", row)
    tqdm.write(EVAL_LINE.format(**row))

    for i, example in enumerate(examples):
        problem = {"step": step, "data": example["data"], "problem": i}
        problem |= {"prompt": example["prompt"], "answer": example["answer"]}
        problem |= {"rewards": reward[i].tolist(), "lengths": length[i].astype(int).tolist()}
        problem |= {"truncated": int(truncated[i].sum()), "response": rows[i * k][3]}
        append(Path(c.out) / "eval_problems.jsonl", problem)


# --- small helpers


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the wall-clock seconds of its block to seconds[phase]."""
    begin = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] += time.perf_counter() - begin


def progress(items, what: str, acc: Accelerator, **more) -> tqdm:
    """The items, with a bar on the main rank's terminal."""
    quiet = None if acc.is_main_process else True  # None: no bar where there is no terminal
    return tqdm(items, desc=what, leave=bool(more), disable=quiet, **more)


def peak_memory_gb() -> float:
    """Of the GPU's allocator, or of the process on a CPU; in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def append(path: Path, row: dict) -> None:
    """Adds one JSON line and flushes it."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")


def finite(value):
    """The same value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
