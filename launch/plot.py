"""Draws runs over each other: python launch/plot.py RUN... [--out curves.png] [--panels reward_mean,entropy]

Hardware: any. Seconds. A RUN is a folder with train.py's metrics.jsonl. Last run 2026-11-30.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

# metric -> title, logarithmic axis
PANELS = {
    "reward_mean": ("mean reward", False),
    "kl_rollout_train_k3": ("KL[mu || pi_old] (k3), nats per token", True),
    "entropy": ("entropy of pi, nats per token", False),
    "routing_agreement": ("tokens with the same experts in both engines, mean over layers", False),
    "first_order_gap": ("first-order gap, median response", True),
    "grad_norm": ("gradient norm", True),
    "length_mean": ("response length, tokens", False),
}


def read(run: Path) -> list[dict]:
    """The rows of RUN/metrics.jsonl; ValueError naming the file if there are none."""
    path = run / "metrics.jsonl"
    try:
        lines = list(path.open(encoding="utf-8"))
        rows = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no step has been written yet")
    return rows


def series(rows: list[dict], metric: str) -> np.ndarray:
    """(steps,) float; a list (one value a layer) becomes its mean, null a gap."""
    values = [row.get(metric) for row in rows]
    values = [[v] if not isinstance(v, list) else v for v in values]
    flat = [[np.nan if v is None else v for v in row] for row in values]
    return np.array([np.mean([v for v in row if v == v] or [np.nan]) for row in flat])


def draw(runs: list[Path], panels: list[str], out: Path) -> None:
    columns = 2 if len(panels) > 1 else 1
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 3 * lines), squeeze=False)
    for axis, metric in zip(axes.flat, panels, strict=False):
        title, log = PANELS.get(metric, (metric, False))
        for run in runs:
            rows = read(run)
            if (
                not isinstance(rows[0].get(metric), int | float | list | None)
                or metric not in rows[0]
            ):
                raise ValueError(f"--panels {metric}: no number of {run}/metrics.jsonl")
            axis.plot([row["step"] for row in rows], series(rows, metric), lw=1.2, label=str(run))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote (--out)")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="picture to write")
    parser.add_argument(
        "--panels",
        default="reward_mean,kl_rollout_train_k3,entropy,routing_agreement",
        help="metrics to draw, with commas: any number or list of metrics.jsonl",
    )
    args = parser.parse_args()
    try:
        draw(args.runs, [panel.strip() for panel in args.panels.split(",")], args.out)
    except (ValueError, OSError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {', '.join(map(str, args.runs))}")


if __name__ == "__main__":
    main()
