"""A long run that is killed again and again must end as one that nobody disturbed; and its memory must not grow.

    python launch/soak.py [--steps 300] [--kills 10] [--model runs/cold-start] [--seed 0]

Runs train.py twice in fp32: undisturbed, with its resident memory read while it runs, and with kill -9 at random
instants, each followed by --resume auto. Exit code 1 unless the exported weights are equal bit for bit, every step's
row is there once with equal metrics, and memory after the last step is within 5% of that after a tenth of them.
Hardware: any CPU, 4 GB; 0.1 hours for 300 steps on 2 cores. Last run
2026-12-01, 2 busy cores: 182 s undisturbed, all three verdicts ok, memory +0.2%.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMED = ("seconds", "rollout_tokens_per_s", "train_tokens_per_s", "peak_memory_gb")


def start(out: Path, args: argparse.Namespace) -> subprocess.Popen:
    """train.py on a small batch, a checkpoint every tenth step."""
    flags = f"--model {args.model} --out {out} --steps {args.steps} --resume auto --precision fp32 --save-every 10"
    flags += " --prompts-per-step 4 --group-size 4 --max-new-tokens 48 --minibatches 2 --replay R3 --lr 2e-5"
    log = (out.parent / f"{out.name}.log").open("a")
    command = [sys.executable, str(ROOT / "train.py"), *flags.split()]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def rows(out: Path) -> list[dict]:
    """The whole lines of metrics.jsonl, without what depends on the clock."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]


def resident(process: subprocess.Popen) -> float:
    """MB of a process that are in memory; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return 0.0


def undisturbed(out: Path, args: argparse.Namespace) -> tuple[float, dict[int, float]]:
    """Seconds of the run, and its memory (MB) by the number of steps done."""
    begin, process, memory = time.monotonic(), start(out, args), {}
    while process.poll() is None:
        done = len(rows(out))
        if done and (now := resident(process)):
            memory.setdefault(done, now)
        time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"{out}.log: ended with code {process.returncode}")
    return time.monotonic() - begin, memory


def killed(out: Path, args: argparse.Namespace, seconds: float) -> list[int]:
    """Kills a run at random instants of what an undisturbed one takes, then lets it end -> steps done at each kill."""
    rng, seen = random.Random(args.seed), []
    for _ in range(args.kills):
        process = start(out, args)
        try:
            process.wait(rng.uniform(0.02, 0.3) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        seen.append(len(rows(out)))
    process = start(out, args)
    if process.wait():
        raise RuntimeError(f"{out}.log: ended with code {process.returncode}")
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", default="runs/cold-start")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "soak", help="made anew")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    whole, pieces = args.out / "whole", args.out / "pieces"
    seconds, memory = undisturbed(whole, args)
    kills = killed(pieces, args, seconds)
    first = min(memory, key=lambda done: abs(done - args.steps // 10))
    growth = memory[max(memory)] / memory[first] - 1
    exports = [(run / "hf" / "model.safetensors").read_bytes() for run in (whole, pieces)]
    verdicts = {
        "weights bit for bit": exports[0] == exports[1],
        f"{args.steps} rows, equal metrics": len(rows(whole)) == args.steps and rows(whole) == rows(pieces),
        f"memory {memory[first]:.0f} MB after {first} steps, {growth:+.1%} after {max(memory)}": growth < 0.05,
    }  # fmt: skip
    print(f"{seconds:.0f} s undisturbed; killed after {', '.join(map(str, kills))} steps")
    for words, fine in verdicts.items():
        print(f"{'ok' if fine else 'FAILED'}: {words}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
