"""The paper's figures in miniature: python launch/figures.py 1 2 3 4 5 beyond | all [--budget MINUTES]

Each figure is a grid of recipes and seeds; each run is train.py as a user would start it, from the toy of cold_start.py.
A figure leaves launch/results/figure_N.json (what every run did, diverged ones too) and figure_N.png, and prints a
table. Runs that the JSON has already are not run again, so that an interrupted figure goes on where it stopped; a run
that was interrupted resumes from its checkpoint.

The regime: 4-digit addition, a 1.8M-parameter MoE, 16 experts top-4, bf16 training. The gap between engines is made as
large as a big model's by rounding the rollout weights to 4 bits per output channel (--rollout-dtype int4). As in the
paper the mini-batch stays (4 prompts x 8 responses) and N makes the batch, so that runs of all N see the same data and
updates, staler ones with larger N. grid1 and grid8 are the learning rates that were tried for it.

Hardware: 2 cores, --jobs 2 (one thread a run): Fig. 1 to 5 took 39, 12, 11, 26 and 9 minutes, beside other jobs
(2026-12-01).
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS, RUNS = ROOT / "launch" / "results", ROOT / "runs" / "figures"
UPDATES = 320  # of a run
# for --budget: of a run, two at once on 2 cores, and of cold_start.py
UPDATE_SECONDS, START_SECONDS, COLD_START_SECONDS = 0.8, 15.0, 100.0
BIN = 8  # updates that are one point of a recorded series: a step of N = 8, eight of N = 1
REGIME = "--rollout-dtype int4 --max-new-tokens 64 --group-size 8"
PROMPTS = 4  # of a mini-batch
ROWS = {  # metric -> label, logarithmic axis
    "reward_mean": ("mean reward", False),
    "kl_rollout_train_k3": ("KL[mu || pi_old], k3", True),
    "entropy": ("entropy of pi", True),
    "routing_agreement": ("same experts in both engines", False),
    "first_order_gap": ("first-order gap, median", True),
}
RATE = "--lr 2e-4"
R2, R3, NO_CLIP, NO_IS = "--replay R2", "--replay R3", "--no-clip", "--no-is-correction"
ON_POLICY = {
    "MiniRL": "", "+ length-norm": "--length-norm", "w/o train-infer-IS": NO_IS,
    "MiniRL, R3": R3, "+ length-norm, R3": f"--length-norm {R3}", "w/o train-infer-IS, R3": f"{NO_IS} {R3}",
}  # fmt: skip
OFF_POLICY = {"no clip": NO_CLIP, "R2, no clip": f"{R2} {NO_CLIP}", "R2": R2, "R3": R3}
STARTS = {style: f"{R2} --model runs/cold-start-{style}" for style in ("columns", "places", "running")}  # fmt: skip
OTHERS = {"MiniRL": "", "GRPO": "--objective grpo", "CISPO": "--objective cispo"}


class Figure(NamedTuple):
    title: str
    seeds: int
    n: int  # updates per batch
    recipes: dict[str, str]  # name -> flags of train.py


def tried(recipes: dict[str, str]) -> dict[str, str]:
    rates = ("1e-4", "2e-4", "4e-4")
    return {f"{name}, lr {r}": f"{z} --lr {r}".strip() for r in rates for name, z in recipes.items()}  # fmt: skip


FIGURES = {
    "1": Figure("Fig. 1, on-policy (N = 1)", 5, 1, ON_POLICY),
    "2": Figure("Fig. 2, N = 2", 3, 2, OFF_POLICY),
    "3": Figure("Fig. 3, N = 4", 3, 4, OFF_POLICY),
    "4": Figure("Fig. 4, N = 8", 5, 8, OFF_POLICY),
    "5": Figure("Fig. 5, three cold starts (N = 2, R2)", 3, 2, STARTS),
    "beyond": Figure("Beyond the paper: GRPO and CISPO (N = 8)", 3, 8, OTHERS),
    "grid1": Figure(
        "Learning rates tried, N = 1", 1, 1, tried({"MiniRL": "", "w/o train-infer-IS": NO_IS})
    ),  # fmt: skip
    "grid8": Figure(
        "Learning rates tried, N = 8", 1, 8, tried({"no clip": NO_CLIP, "R2": R2, "R3": R3})
    ),  # fmt: skip
}
PAPER = ("1", "2", "3", "4", "5", "beyond")  # what "all" makes


# --- the runs


def cold_start(flags: str) -> None:
    """Makes the model that a run starts from, unless it is there."""
    words = shlex.split(flags)
    model = words[words.index("--model") + 1] if "--model" in words else "runs/cold-start"
    style = model.partition("cold-start-")[2] or "columns"
    command = [sys.executable, "launch/cold_start.py", "--out", model, "--style", style]
    subprocess.run(command, cwd=ROOT, check=True)


def command_of(figure: str, recipe: str, seed: int, updates: int) -> str:
    """The flags of train.py for one run."""
    n = FIGURES[figure].n
    batch = f"--minibatches {n} --prompts-per-step {PROMPTS * n} --steps {updates // n}"
    return f"{REGIME} {RATE} {batch} --seed {seed} {FIGURES[figure].recipes[recipe]}".strip()


def run(figure: str, recipe: str, seed: int, updates: int) -> dict:
    """One run of train.py -> what it did, a number for every BIN updates; how it ended, if not by its last step."""
    name = "".join(z if z.isalnum() else "-" for z in f"{figure} {recipe} {seed} {updates}")
    out, begin = RUNS / name, time.time()
    command = command_of(figure, recipe, seed, updates)
    keep = f"--resume auto --save-every {updates // FIGURES[figure].n // 4} --out {out}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log").open("a") as log:
        done = subprocess.run(
            [sys.executable, "train.py", *shlex.split(command), *shlex.split(keep)],
            cwd=ROOT, env=environment, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: stopped by itself, a result too
        raise SystemExit(f"figures.py: {out}/log: ended with code {done.returncode}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    a_bin = BIN // FIGURES[figure].n  # steps
    bins = [rows[i : i + a_bin] for i in range(0, len(rows), a_bin)]
    series = {metric: [mean_of([row[metric] for row in z]) for z in bins] for metric in ROWS}
    last = (out / "log").read_text().splitlines()
    stopped = next((z for z in reversed(last) if "stopped" in z), "") if done.returncode else ""
    return {
        "recipe": recipe, "seed": seed, "flags": command, "seconds": round(time.time() - begin),
        "stopped": stopped, "series": series,
    }  # fmt: skip


def mean_of(values: list) -> float | None:
    """The mean to 4 digits, of metrics with a value a layer too; null where nothing was measured."""
    known = [v for v in np.hstack(values) if v is not None]
    return float(f"{np.mean(known):.4g}") if known else None


def budget(minutes: float, recipes: int, seeds: int, jobs: int) -> tuple[int, int]:
    """Seeds and updates that fit: fewer seeds before fewer than 160 updates."""
    of_a_run = (minutes * 60 - COLD_START_SECONDS) * jobs / recipes
    seeds = max(1, min(seeds, int(of_a_run / (START_SECONDS + 160 * UPDATE_SECONDS))))
    fit = min(UPDATES, (of_a_run / seeds - START_SECONDS) / UPDATE_SECONDS)
    return seeds, max(4 * BIN, int(fit) // BIN * BIN)


def make(figure: str, minutes: float | None, jobs: int, out: Path) -> dict:
    """Runs what is missing of a figure -> its results, which are written after each run."""
    title, seeds, n, recipes = FIGURES[figure]
    updates = UPDATES
    if minutes:
        seeds, updates = budget(minutes, len(recipes), seeds, jobs)
    path = out / f"figure_{figure}.json"
    results = json.loads(path.read_text()) if path.exists() else {"runs": [], "updates": updates}
    if results["updates"] != updates:
        raise SystemExit(
            f"figures.py: {path}: has runs of {results['updates']} updates, not {updates}; --out another folder"
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
    results |= {"figure": figure, "title": title, "n": n, "commit": commit}
    results |= {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "jobs": jobs,
    }
    results["command"] = f"python launch/figures.py {figure}" + (f" --budget {minutes:g}" if minutes else "")  # fmt: skip
    have = {(r["recipe"], r["seed"]) for r in results["runs"]}
    for flags in {flags for flags in recipes.values() if "--model" in flags} or {""}:
        cold_start(flags)
    missing = [
        (name, seed) for seed in range(seeds) for name in recipes if (name, seed) not in have
    ]
    with ThreadPoolExecutor(jobs) as pool:
        for r in pool.map(lambda job: run(figure, *job, updates), missing):
            results["runs"].append(r)
            path.write_text(json.dumps(results) + "\n")
            reward = r["series"]["reward_mean"]
            print(
                f"{figure}: {r['recipe']}, seed {r['seed']}: reward {reward[0]} -> {reward[-1]}, {r['seconds']} s",
                flush=True,
            )
    return results


# --- what they show


def known(values: list) -> list[float]:
    return [v for v in values if v is not None]


def smooth(values: list) -> np.ndarray:
    """Means of each point and the two before it, null left out."""
    return np.array([np.mean(known(values[max(0, i - 2) : i + 1]) or [np.nan]) for i in range(len(values))])  # fmt: skip


def halves_at(r: dict) -> int | None:
    """The point at which the reward, smoothed, has fallen below half of its best so far; it may rise again."""
    reward = smooth(r["series"]["reward_mean"])
    below = np.flatnonzero(reward < np.maximum.accumulate(reward) / 2)
    return int(below[0]) if len(below) else None


def diverged(r: dict) -> bool:
    """It stopped itself, or its reward ended below half of what it began with."""
    reward = r["series"]["reward_mean"]
    return bool(r["stopped"]) or np.mean(reward[-5:]) < np.mean(reward[:2]) / 2


def summary(results: dict) -> dict[str, dict]:
    """Recipe -> over its seeds: reward of the first two and of the last five points (mean, least, largest), the best
    five in a row (mean), KL and agreement at the end (mean), how many runs halved (`halves_at`) and diverged."""
    table = {}
    for recipe in dict.fromkeys(r["recipe"] for r in results["runs"]):
        runs = [r for r in results["runs"] if r["recipe"] == recipe]
        rewards = [r["series"]["reward_mean"] for r in runs]
        ends = [np.mean(z[-5:]) for z in rewards]
        best = [max(np.mean(z[i : i + 5]) for i in range(max(1, len(z) - 4))) for z in rewards]
        last = {m: float(np.mean([np.mean(known(r["series"][m][-5:])) for r in runs])) for m in ROWS}  # fmt: skip
        table[recipe] = {
            "seeds": len(runs), "begin": float(np.mean([np.mean(z[:2]) for z in rewards])),
            "best": float(np.mean(best)), "end": float(np.mean(ends)), "least": float(min(ends)),
            "largest": float(max(ends)), "halved": sum(halves_at(r) is not None for r in runs),
            "diverged": sum(map(diverged, runs)),
            "kl": last["kl_rollout_train_k3"], "agreement": last["routing_agreement"],
        }  # fmt: skip
    return table


HEAD = "| figure | recipe | reward: first | best | last [range over seeds] | KL (k3) | agreement | halved | diverged |"


def rows(results: dict) -> list[str]:
    """The table, in Markdown, as launch/results/README.md has it."""
    lines = []
    for recipe, z in summary(results).items():
        end = f"{z['end']:.2f} [{z['least']:.2f}, {z['largest']:.2f}]"
        cells = [results["figure"], recipe, f"{z['begin']:.2f}", f"{z['best']:.2f}", end]
        cells += [f"{z['kl']:.1e}", f"{z['agreement']:.3f}"]
        cells += [f"{z[how]} of {z['seeds']}" for how in ("halved", "diverged")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(results: dict, out: Path) -> None:
    """Rows: metrics; a line a recipe, the mean over seeds, in the range over seeds."""
    figure, axes = plt.subplots(len(ROWS), 1, figsize=(7, 2.1 * len(ROWS)), sharex=True)
    for axis, (metric, (label, log)) in zip(axes, ROWS.items(), strict=True):
        for number, recipe in enumerate(summary(results)):
            lines = [r["series"][metric] for r in results["runs"] if r["recipe"] == recipe]
            grid = np.full((len(lines), results["updates"] // BIN), np.nan)
            for row, line in zip(grid, lines, strict=True):
                row[: len(line)] = [np.nan if v is None else v for v in line]
            drawn = ~np.isnan(grid).all(0)
            x, grid = BIN * np.flatnonzero(drawn), grid[:, drawn]
            axis.plot(x, np.nanmean(grid, 0), color=f"C{number}", lw=1.2, label=recipe)
            axis.fill_between(x, np.nanmin(grid, 0), np.nanmax(grid, 0), color=f"C{number}", alpha=0.12, lw=0)  # fmt: skip
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.25)
        if log:
            axis.set_yscale("log")
    axes[0].legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.suptitle(results["title"], fontsize=10)
    axes[-1].set_xlabel(f"gradient updates (points: means of {BIN})")
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
    for figure in PAPER if "all" in args.figures else args.figures:
        results = make(figure, args.budget, args.jobs, args.out)
        draw(results, args.out / f"figure_{figure}.png")
        about = f"{results['title']}, {results['updates']} updates a run"
        print("", about, HEAD, *rows(results), sep="\n")


if __name__ == "__main__":
    main()
