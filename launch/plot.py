"""Draws runs over each other: python launch/plot.py RUN... [--out curves.png] [--panels reward_mean,entropy] [--table]

Hardware: any. Seconds. A RUN is a folder with train.py's metrics.jsonl (and eval.jsonl, for avg_at_k). With --table, or
where matplotlib is not installed, a table on the terminal instead. Last run 2026-12-01.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

# metric -> title, head of a table's column, logarithmic axis; drawn from the first to the last
PANELS = {
    "reward_mean": ("mean reward", "reward", False),
    "avg_at_k": ("avg@k of evaluation", "avg@k", False),
    "kl_rollout_train_k3": ("KL[mu || pi_old] (k3), nats per token", "KL k3", True),
    "entropy": ("entropy of pi, nats per token", "entropy", False),
    "routing_agreement": ("same experts in both engines, a line a layer", "agreement", False),
    "first_order_gap": ("first-order gap, median response", "gap", True),
}
TITLES = PANELS | {
    "grad_norm": ("gradient norm", "grad norm", True),
    "length_mean": ("response length, tokens", "length", False),
}
EVALUATED = ("avg_at_k", "pass_at_k")  # of eval.jsonl


def read(path: Path) -> list[dict]:
    """The whole rows of a file; ValueError naming it where it can't be read."""
    try:
        lines = list(path.open(encoding="utf-8"))
        return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def series(run: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric of a run: steps (n,), values (n, layers or 1) float; null becomes NaN. Empty without an evaluation.

    ValueError where the run has no row yet, or the metric is no number in it.
    """
    path = run / ("eval.jsonl" if metric in EVALUATED else "metrics.jsonl")
    rows = read(path) if path.exists() or metric not in EVALUATED else []
    if not rows and metric not in EVALUATED:
        raise ValueError(f"{path}: no step has been written yet")
    values = [row.get(metric) for row in rows]
    if any(isinstance(v, str | dict) for v in values) or any(metric not in row for row in rows[:1]):
        raise ValueError(f"--panels {metric}: no number of {path}")
    values = [v if isinstance(v, list) else [v] for v in values]
    return np.array([row["step"] for row in rows]), np.array(values, float)


def draw(runs: list[Path], panels: list[str], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [m for m in panels if any(len(series(run, m)[0]) for run in runs)]
    columns = 2 if len(panels) > 1 else 1
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 3 * lines), squeeze=False)
    for axis, metric in zip(axes.flat, panels, strict=False):
        title, _, log = TITLES.get(metric, (metric, metric, False))
        for color, run in enumerate(runs):
            steps, values = series(run, metric)
            for layer, line in enumerate(values.T):  # from faint, the first layer, to full
                shade = (layer + 1) / values.shape[1]
                style = {"lw": 1.2, "color": f"C{color}", "alpha": 0.25 + 0.75 * shade}
                style |= {"marker": "."} if len(steps) < 3 else {}
                axis.plot(steps, line, **style, label=str(run) if shade == 1 else None)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if log:
            axis.set_yscale("log")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    if len(runs) > 1:
        axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def table(runs: list[Path], panels: list[str], lines: int = 12) -> str:
    """Up to `lines` stretches of each run, each the mean of what it holds (over layers too); "-" for nothing."""
    heads = [TITLES.get(metric, (metric, metric, False))[1] for metric in panels]
    out = []
    for run in runs:
        columns = [series(run, metric) for metric in panels]
        last = max(int(steps.max(initial=0)) for steps, _ in columns)
        edges = np.unique(np.linspace(0, last + 1, min(lines, last + 1) + 1).astype(int))
        out += [f"{run}", "".join(f"{head:>12}" for head in ["steps", *heads])]
        for begin, end in zip(edges, edges[1:], strict=False):
            cells = [f"{begin}-{end - 1}" if end - begin > 1 else f"{begin}"]
            for steps, values in columns:
                found = values[(steps >= begin) & (steps < end)]
                found = found[np.isfinite(found)]
                cells.append(f"{found.mean():.4g}" if found.size else "-")
            out.append("".join(f"{cell:>12}" for cell in cells))
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote (--out)")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="picture to write")
    parser.add_argument(
        "--panels",
        default=",".join(PANELS),
        help="metrics to draw, with commas: any number or list of metrics.jsonl or eval.jsonl",
    )
    parser.add_argument("--table", action="store_true", help="print a table, draw nothing")
    args = parser.parse_args()
    panels = [panel.strip() for panel in args.panels.split(",")]
    try:
        if args.table or not importlib.util.find_spec("matplotlib"):
            print(table(args.runs, panels))
            return
        draw(args.runs, panels, args.out)
    except (ValueError, OSError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {', '.join(map(str, args.runs))}")


if __name__ == "__main__":
    main()
