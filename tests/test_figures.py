"""launch/figures.py: what it asks of train.py exists, its table is arithmetic on the committed JSON, README quotes that."""

import json
import re
import shlex
from pathlib import Path

import pytest

from launch import figures, flags
from train import Config

ROOT = Path(__file__).resolve().parents[1]
RECORDED = sorted((ROOT / "launch" / "results").glob("figure_*.json"))


def test_every_recipe_is_a_command_of_train():
    """The flags of each run parse and make sense, no two recipes of a figure are the same run, and Fig. 1 to 4 have the
    paper's N and switches. Catches a renamed flag and a recipe that differs from another in name alone.
    """
    for name, (_, seeds, recipes) in figures.FIGURES.items():
        assert seeds >= (5 if name in "14" else 3)
        runs = {}
        for recipe, more in recipes.items():
            c = Config.from_flags(shlex.split(f"{figures.REGIME} {more}"))
            flags.check(c, 1, 1)
            assert repr(c) not in runs, (recipe, runs[repr(c)])
            runs[repr(c)] = recipe
            assert c.minibatches == {"1": 1, "2": 2, "3": 4, "4": 8, "5": 2, "beyond": 8}[name]
            assert c.clip == ("no clip" not in recipe)
            assert c.is_correction == ("w/o train-infer-IS" not in recipe)
            assert c.replay == next((r for r in ("R2", "R3") if r in recipe or name == "5"), "none")


@pytest.mark.parametrize("minutes", [5, 20, 90, 400])
def test_budget_fits(minutes):
    """Seeds and steps of Fig. 1 (6 recipes) by the driver's own estimate stay within the minutes, and use most of them
    unless the whole figure fits."""
    seeds, steps = figures.budget(minutes, 6, 5, 2)
    a_run = figures.START_SECONDS + steps * figures.STEP_SECONDS
    assert 6 * seeds * a_run / 2 <= minutes * 60
    assert (seeds, steps) == (5, figures.STEPS) or 6 * (seeds + 1) * a_run / 2 > 0.8 * minutes * 60


def made_up(rewards: list[list[float]], stopped: str = "") -> dict:
    runs = [
        {"recipe": "R2", "seed": s, "stopped": stopped, "series": dict.fromkeys(figures.ROWS, z)}
        for s, z in enumerate(rewards)
    ]
    return {"title": "t", "steps": len(rewards[0]), "runs": runs}


def test_summary_by_hand():
    """Two seeds, 0.4 to 0.8 and 0.4 to 0.1: mean 0.45 in [0.1, 0.8], one diverged; one that stopped counts as diverged."""
    z = figures.summary(made_up([[0.4] * 5 + [0.8] * 10, [0.4] * 5 + [0.1] * 10]))["R2"]
    found = [round(z[k], 9) for k in ("begin", "end", "least", "largest", "diverged", "seeds")]
    assert found == [0.4, 0.45, 0.1, 0.8, 1, 2]
    assert figures.summary(made_up([[0.4] * 15], "step 3: stopped"))["R2"]["diverged"] == 1


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_readme_quotes_the_recorded_figures(path):
    """Each recipe's row in README is what the committed JSON gives; every seed is there, and no run was dropped."""
    results = json.loads(path.read_text())
    _, seeds, recipes = figures.FIGURES[results["figure"]]
    found = {(r["recipe"], r["seed"]) for r in results["runs"]}
    assert found == {(recipe, seed) for recipe in recipes for seed in range(seeds)}
    readme = (ROOT / "README.md").read_text()
    for recipe, z in figures.summary(results).items():
        cells = [results["figure"], recipe, f"{z['begin']:.2f}"]
        cells += [f"{z['end']:.2f} [{z['least']:.2f}, {z['largest']:.2f}]", f"{z['kl']:.1e}"]
        cells += [f"{z['agreement']:.3f}", f"{z['diverged']} of {z['seeds']}"]
        assert f"| {' | '.join(cells)} |" in readme, cells
    assert re.search(rf"figure_{results['figure']}\.(png|json)", readme)
