"""The paper's figures in miniature: python launch/figures.py 1 2 3 4 5 beyond | all [--budget MINUTES]

Each figure is a grid of recipes and seeds; each run is train.py as a user would start it, from the toy of cold_start.py.
A figure leaves launch/results/figure_N.json (what every run did, diverged ones too) and figure_N.png, and prints a
table. Runs that the JSON has already are not run again, so that an interrupted figure goes on where it stopped; a run
that was interrupted resumes from its checkpoint.

The regime: 4-digit addition, a 1.8M-parameter MoE, 16 experts top-4, bf16 training. The gap between engines is made as
large as a big model's by rounding the rollout weights to 4 bits per output channel (--rollout-dtype int4), staleness by N
updates a batch, learning rate 1e-4.

Hardware: 2 cores; hours: 0.5 for Fig. 4, --jobs 2 (one thread a run). Last run 2026-12-01: Fig. 4, 32
minutes beside other jobs; the others not yet.
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS, RUNS = ROOT / "launch" / "results", ROOT / "runs" / "figures"
STEPS, STEP_SECONDS, START_SECONDS = (
    60,
    4.0,
    20.0,
)  # of a run; seconds for --budget, 2 jobs on 2 cores
REGIME = "--rollout-dtype int4 --lr 1e-4 --max-new-tokens 64 --prompts-per-step 32 --group-size 8"
ROWS = {  # metric -> label, logarithmic axis
    "reward_mean": ("mean reward", False),
    "kl_rollout_train_k3": ("KL[mu || pi_old], k3", True),
    "entropy": ("entropy of pi", True),
    "routing_agreement": ("same experts in both engines", False),
    "first_order_gap": ("first-order gap, median", True),
}
MINIRL, NO_CLIP = {"R2": "--replay R2", "R3": "--replay R3"}, "--no-clip"


def off_policy(n: int) -> dict[str, str]:
    """The recipes of Fig. 2 to 4."""
    recipes = {"no clip": NO_CLIP, "R2, no clip": f"{MINIRL['R2']} {NO_CLIP}", **MINIRL}
    return {name: f"--minibatches {n} {flags}" for name, flags in recipes.items()}


ABLATIONS = {"MiniRL": "", "+ length-norm": "--length-norm", "w/o train-infer-IS": "--no-is-correction"}  # fmt: skip
FIGURES = {  # name -> title, seeds, recipe -> flags of train.py
    "1": (
        "Fig. 1, on-policy (N = 1)",
        5,
        {
            f"{name}{', R3' * bool(r3)}": f"{flags} {r3}".strip()
            for (name, flags), r3 in itertools.product(ABLATIONS.items(), ("", MINIRL["R3"]))
        },
    ),
    "2": ("Fig. 2, N = 2", 3, off_policy(2)),
    "3": ("Fig. 3, N = 4", 3, off_policy(4)),
    "4": ("Fig. 4, N = 8", 5, off_policy(8)),
    "5": (
        "Fig. 5, three cold starts (N = 2, R2)",
        3,
        {
            style: f"--minibatches 2 --replay R2 --model runs/cold-start-{style}"
            for style in ("columns", "places", "running")
        },
    ),
    "beyond": (
        "Beyond the paper: GRPO and CISPO (N = 8)",
        3,
        {
            "MiniRL": "--minibatches 8",
            "GRPO": "--minibatches 8 --objective grpo",
            "CISPO": "--minibatches 8 --objective cispo",
        },
    ),
}


# --- the runs


def cold_start(flags: str) -> None:
    """Makes the model that a run starts from, unless it is there."""
    words = shlex.split(flags)
    model = words[words.index("--model") + 1] if "--model" in words else "runs/cold-start"
    style = model.partition("cold-start-")[2] or "columns"
    command = [sys.executable, "launch/cold_start.py", "--out", model, "--style", style]
    subprocess.run(command, cwd=ROOT, check=True)


def run(figure: str, recipe: str, flags: str, seed: int, steps: int) -> dict:
    """One run of train.py -> what it did, step by step; how it ended, if not by its last step."""
    name = "".join(z if z.isalnum() else "-" for z in f"{figure} {recipe} {seed} {steps}")
    out, begin = RUNS / name, time.time()
    command = (
        f"{REGIME} --steps {steps} --seed {seed} --resume auto --save-every 20 --keep 1 {flags}"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log").open("a") as log:
        done = subprocess.run(
            [sys.executable, "train.py", *shlex.split(command), "--out", str(out)],
            cwd=ROOT, env=environment, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: stopped by itself, a result too
        raise SystemExit(f"figures.py: {out}/log: ended with code {done.returncode}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    series = {metric: [mean_of(row[metric]) for row in rows] for metric in ROWS}
    last = (out / "log").read_text().splitlines()
    stopped = next((z for z in reversed(last) if "stopped" in z), "") if done.returncode else ""
    return {
        "recipe": recipe, "seed": seed, "flags": command, "seconds": round(time.time() - begin),
        "stopped": stopped, "series": series,
    }  # fmt: skip


def mean_of(value) -> float | None:
    """A metric to 4 digits; of a list (one value a layer) the mean."""
    values = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
    return float(f"{np.mean(values):.4g}") if values else None


def budget(minutes: float, recipes: int, seeds: int, jobs: int) -> tuple[int, int]:
    """Seeds and steps that fit: fewer seeds before fewer than 30 steps."""
    of_a_run = minutes * 60 * jobs / recipes
    seeds = max(1, min(seeds, int(of_a_run / (START_SECONDS + 30 * STEP_SECONDS))))
    return seeds, int(max(5, min(STEPS, (of_a_run / seeds - START_SECONDS) / STEP_SECONDS)))


def make(figure: str, minutes: float | None, jobs: int, out: Path) -> dict:
    """Runs what is missing of a figure -> its results, which are written after each run."""
    title, seeds, recipes = FIGURES[figure]
    steps = STEPS
    if minutes:
        seeds, steps = budget(minutes, len(recipes), seeds, jobs)
    path = out / f"figure_{figure}.json"
    results = json.loads(path.read_text()) if path.exists() else {"runs": []}
    if results["runs"] and results["steps"] != steps:
        raise SystemExit(
            f"figures.py: {path}: has runs of {results['steps']} steps, not {steps}; --out another folder"
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
    results |= {"figure": figure, "title": title, "steps": steps, "commit": commit}
    results |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "jobs": jobs}
    results["command"] = f"python launch/figures.py {figure}" + (f" --budget {minutes:g}" if minutes else "")  # fmt: skip
    have = {(r["recipe"], r["seed"]) for r in results["runs"]}
    for flags in {flags for flags in recipes.values() if "--model" in flags} or {""}:
        cold_start(flags)
    missing = [(name, flags, seed) for seed in range(seeds) for name, flags in recipes.items() if (name, seed) not in have]  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        for r in pool.map(lambda job: run(figure, *job, steps), missing):
            results["runs"].append(r)
            path.write_text(json.dumps(results) + "\n")
            reward = r["series"]["reward_mean"]
            print(
                f"{figure}: {r['recipe']}, seed {r['seed']}: reward {reward[0]} -> {reward[-1]}, {r['seconds']} s"
            )
    return results


# --- what they show


def summary(results: dict) -> dict[str, dict]:
    """Recipe -> over its seeds: reward of the first and last ten steps (mean, least, largest), KL and agreement at the
    end (mean), and how many runs diverged: their reward ended below half of what it began with, or they stopped."""
    table = {}
    for recipe in dict.fromkeys(r["recipe"] for r in results["runs"]):
        runs = [r for r in results["runs"] if r["recipe"] == recipe]
        ends = [np.mean(r["series"]["reward_mean"][-10:]) for r in runs]
        begins = [np.mean(r["series"]["reward_mean"][:5]) for r in runs]
        diverged = [bool(r["stopped"]) or end < begin / 2 for r, end, begin in zip(runs, ends, begins, strict=True)]  # fmt: skip
        last = {m: float(np.mean([np.mean([v for v in r["series"][m][-10:] if v is not None]) for r in runs])) for m in ROWS}  # fmt: skip
        table[recipe] = {
            "seeds": len(runs), "begin": float(np.mean(begins)), "end": float(np.mean(ends)),
            "least": float(min(ends)), "largest": float(max(ends)), "diverged": sum(diverged),
            "kl": last["kl_rollout_train_k3"], "agreement": last["routing_agreement"],
        }  # fmt: skip
    return table


def print_table(results: dict) -> None:
    print(
        f"\n{results['title']}, {results['steps']} steps: mean reward, first 5 -> last 10 [range over seeds]"
    )
    for recipe, z in summary(results).items():
        line = f"  {recipe:26} {z['begin']:.2f} -> {z['end']:.2f} [{z['least']:.2f}, {z['largest']:.2f}]"
        print(
            f"{line}  KL {z['kl']:.1e}  agreement {z['agreement']:.3f}  diverged {z['diverged']} of {z['seeds']}"
        )


def draw(results: dict, out: Path) -> None:
    """Rows: metrics; a line a recipe, the mean over seeds, in the range over seeds."""
    figure, axes = plt.subplots(len(ROWS), 1, figsize=(7, 2.1 * len(ROWS)), sharex=True)
    recipes = list(summary(results))
    for axis, (metric, (label, log)) in zip(axes, ROWS.items(), strict=True):
        for number, recipe in enumerate(recipes):
            lines = [r["series"][metric] for r in results["runs"] if r["recipe"] == recipe]
            grid = np.full((len(lines), results["steps"]), np.nan)
            for row, line in zip(grid, lines, strict=True):
                row[: len(line)] = [np.nan if v is None else v for v in line]
            known = ~np.isnan(grid).all(0)
            x, grid = np.flatnonzero(known), grid[:, known]
            axis.plot(x, np.nanmean(grid, 0), color=f"C{number}", lw=1.2, label=recipe)
            axis.fill_between(x, np.nanmin(grid, 0), np.nanmax(grid, 0), color=f"C{number}", alpha=0.12, lw=0)  # fmt: skip
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.25)
        if log:
            axis.set_yscale("log")
    axes[0].legend(fontsize=7, ncols=3)
    axes[0].set_title(results["title"], fontsize=10)
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="+", choices=[*FIGURES, "all"], help="which")
    parser.add_argument(
        "--budget", type=float, help="minutes for each figure; fewer seeds and steps"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of JSON and PNG")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES if "all" in args.figures else args.figures:
        results = make(figure, args.budget, args.jobs, args.out)
        draw(results, args.out / f"figure_{figure}.png")
        print_table(results)


if __name__ == "__main__":
    main()
