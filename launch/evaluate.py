"""What an evaluation measures and leaves behind: avg@k, pass@k, lengths; eval.jsonl, eval_problems.jsonl (imported by
train.py). Every number is over all engines."""

import math
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from launch.report import append


def sampling(c) -> dict:
    """The arguments of Engine.generate for --eval-data; 0 stands for what training uses."""
    return {
        "max_new_tokens": c.eval_max_new_tokens or c.max_new_tokens,
        "temperature": c.eval_temperature or c.temperature,
        "top_p": c.eval_top_p,
    }


def pass_at(rewards: np.ndarray, k: int) -> float:
    """pass@k from n >= k responses to each problem, unbiased: rewards (problems, n).

    Of all subsets of k responses, the mean of the best reward: the i-th smallest of n is the best of C(i - 1, k - 1).
    With rewards 0 and 1 and c right responses it is 1 - C(n - c, k)/C(n, k) (Chen et al. 2021, arXiv 2107.03374).
    """
    n = rewards.shape[1]
    share = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return float((np.sort(rewards, axis=1) @ share).mean())


def standard_error(rewards: np.ndarray) -> float:
    """Of avg@k, when the same problems are answered again: rewards (problems, k); NaN for k = 1."""
    problems, k = rewards.shape
    if k < 2:
        return math.nan
    return float(np.sqrt((rewards.var(1, ddof=1) / k).sum()) / problems)


def write(step: int, batch, examples: list[dict], c, acc: Accelerator) -> None:
    """A row of eval.jsonl, one a problem of eval_problems.jsonl and a line, from k responses to each example."""
    k = c.eval_samples
    fields = (batch.group_ids.tolist(), batch.rewards.tolist(), map(len, batch.logp_rollout))
    fields += (batch.truncated.tolist(), batch.failed.tolist(), batch.texts)
    mine = list(zip(*fields, strict=True)) if acc.process_index % c.rollout_tp == 0 else []
    mine = [(*row[:5], row[5] if b % k == 0 else "") for b, row in enumerate(mine)]
    rows = gather_object(mine)
    numbers = np.array([row[1:5] for row in rows], float).reshape(-1, k, 4)
    reward, length, truncated, failed = numbers.transpose(2, 0, 1)  # (n, k) each
    source = np.array([example["data"] for example in examples])
    ks = sorted({2**i for i in range(k.bit_length())} | {k})  # 1, 2, 4 .. and k
    row = {"step": step, "n": len(reward), "k": k, "avg_at_k": reward.mean()}
    row |= {"avg_at_k_se": standard_error(reward), "pass_at_k": pass_at(reward, k)}
    row |= {"pass_at": {str(j): pass_at(reward, j) for j in ks}}
    row |= {"length_mean": length.mean(), "truncated_frac": truncated.mean()}
    row |= {"reward_errors": int(failed.sum())}
    row |= {"data": {name: reward[source == name].mean() for name in dict.fromkeys(source)}}
    row |= sampling(c) | {"seed": c.seed, "model": c.model, "reward": c.reward}
    acc.log({f"eval_{name}": row[name] for name in ("avg_at_k", "pass_at_k")}, step=step - 1)
    if not acc.is_main_process:
        return
    append(Path(c.out) / "eval.jsonl", row)
    for i, example in enumerate(examples):
        problem = {"step": step, "data": example["data"], "problem": i}
        problem |= {name: example[name] for name in ("prompt", "answer")}
        problem |= {"rewards": reward[i].tolist(), "lengths": length[i].astype(int).tolist()}
        problem |= {"truncated": int(truncated[i].sum()), "response": rows[i * k][5]}
        append(Path(c.out) / "eval_problems.jsonl", problem)
    line = "eval at step {step}: avg@{k} {avg_at_k:.3f} +- {avg_at_k_se:.3f}, pass@{k} {pass_at_k:.3f}, {n} problems, "
    line += "length {length_mean:.0f}, truncated {truncated_frac:.1%}"
    tqdm.write(line.format(**row))
