"""What the first-order argument neglects, drawn: python launch/first_order.py [--out PNG]

Hardware: any CPU, one core. 6 s. Last run 2026-12-07.
Expected result: the gap between J_seq and J_token (less its constant) falls by 4 and the gap between their gradients by
2 whenever the step h away from mu halves, for a tabular policy and for an MoE with replayed experts; the MoE with its
live router breaks the law at every h at which an expert flips, and obeys it below.

The policies, both objectives and the experiment stand in tests/test_formulation.py, where they are explained and
tested; this only draws. It leaves a PNG and, beside it, a JSON with the numbers drawn.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from test_formulation import CASES, first_order

RESULTS = Path(__file__).resolve().parent / "results"


def draw_first_order(results: dict, out: Path) -> None:
    titles = {
        "discrepancy": r"discrepancy alone: $\pi = \pi_{old}$",
        "staleness": r"staleness alone: $\pi_{old} = \mu$",
        "both": "both",
    }
    kinds = {  # color, marker, label, order in h
        "objective": ("C0", "o", r"$|J_{seq} - J_{token}|$, less the constant", 2),
        "gradient": ("C1", "s", r"$|\nabla J_{seq} - \nabla J_{token}|\ /\ |\nabla J_{seq}|$", 1),
    }
    rows = {
        "a tabular policy": ["tabular"],
        "moe.py, filled: experts of $\\mu$ replayed": ["MoE, replayed", "MoE, live"],
    }
    figure, axes = plt.subplots(2, 3, figsize=(11.5, 7.4), sharex=True, sharey=True)
    for line, (row, names) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(row, fontsize=11)
        for (axis, case), name in itertools.product(zip(line, CASES, strict=True), names):
            r, live = results[name][case], name == "MoE, live"
            for kind, (color, marker, label, order) in kinds.items():
                style = {"mfc": "white", "ms": 3.5, "ls": ":", "label": f"{kind}s, live router"}
                style = style if live else {"ms": 6, "ls": "", "label": label}
                axis.loglog(r["h"], r[kind], color=color, marker=marker, lw=1.2, **style)
                if not live:
                    guide = [r[kind][-1] * (h / r["h"][-1]) ** order for h in r["h"]]
                    style = {"ls": "--" if order == 2 else "-.", "label": f"slope {order}"}
                    axis.loglog(r["h"], guide, color="0.35", lw=0.9, zorder=0, **style)
            if live:
                last = min(h for h, flips in zip(r["h"], r["flips"], strict=True) if flips)
                axis.axvspan(last / 2**0.5, r["h"][0] * 2**0.5, color="0.93", zorder=-1)
                note = {"transform": axis.get_xaxis_transform(), "fontsize": 8, "color": "0.35"}
                axis.text(last / 2**0.4, 0.03, "an expert has flipped", **note)
            axis.grid(alpha=0.25)
    for axis, case in zip(axes[0], CASES, strict=True):
        axis.set_title(titles[case], fontsize=11)
    for axis in axes[1]:
        axis.set_xlabel(r"$h$, distance of $\pi$ from $\mu$")
    axes[0, 0].set_xlim(results["tabular"]["both"]["h"][-1] / 1.4, 2**0.5)
    handles = dict(zip(*axes[1, 0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    figure.suptitle("What the token-level objective neglects, by enumeration of every response")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "first_order.png", help="picture")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = first_order()
    draw_first_order(results, args.out)
    for (name, cases), kind in itertools.product(results.items(), ("objective", "gradient")):
        for case, r in cases.items():
            falls = [a / b for a, b in itertools.pairwise(r[kind])]
            print(f"{name:14}{case:12}gap of {kind + 's':11}falls by", *(f"{x:.3g}" for x in falls))
    six_digits = json.loads(json.dumps(results), parse_float=lambda x: float(f"{float(x):.6g}"))
    args.out.with_suffix(".json").write_text(json.dumps(six_digits) + "\n")
    print(f"{args.out} and {args.out.with_suffix('.json').name}")


if __name__ == "__main__":
    main()
