"""launch/figures.py: what it asks of train.py exists, its table is arithmetic on the committed JSON, launch/results/README.md quotes that."""

import json
import shlex
from pathlib import Path

import pytest

from launch import figures
from launch.lib import flags, log
from train import Config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "launch" / "results" / "README.md").read_text()
RECORDED = sorted((ROOT / "launch" / "results").glob("figure_*.json"))


def test_every_recipe_is_a_command_of_train():
    """The flags of each run parse and make sense, no two recipes of a figure are the same run, and Fig. 1 to 4 have the
    paper's N and switches; mini-batch and data are the same for each N. Catches a renamed flag and a recipe that differs
    from another in name alone.
    """
    for name, figure in figures.FIGURES.items():
        assert figure.seeds >= (5 if name in "14" else 1 if "grid" in name else 3)
        runs = {}
        for recipe in figure.recipes:
            argv = shlex.split(figures.command_of(name, recipe, 0, figures.UPDATES))
            c = Config.from_flags(argv)
            flags.check(c, 1, 1)
            assert repr(c) not in runs, (recipe, runs[repr(c)])
            runs[repr(c)] = recipe
            n = {"1": 1, "2": 2, "3": 4, "4": 8, "5": 2, "beyond": 8, "grid1": 1, "grid8": 8}[name]
            assert c.minibatches == n and c.steps * n == 320 and c.prompts_per_step == 4 * n
            assert c.clip == ("no clip" not in recipe)
            assert c.is_correction == ("w/o train-infer-IS" not in recipe)
            assert c.replay == next((r for r in ("R2", "R3") if r in recipe or name == "5"), "none")


@pytest.mark.parametrize("minutes", [5, 20, 90, 400])
def test_budget_fits(minutes):
    """Seeds and updates of Fig. 1 (6 recipes) by the driver's own estimate stay within the minutes, and use most of them
    unless the whole figure fits."""
    seeds, updates = figures.budget(minutes, 6, 5, 2)
    a_run = figures.START_SECONDS + updates * figures.UPDATE_SECONDS
    room = minutes * 60 - figures.COLD_START_SECONDS
    assert 6 * seeds * a_run / 2 <= room
    assert (seeds, updates) == (5, figures.UPDATES) or 6 * (seeds + 1) * a_run / 2 > 0.8 * room


def made_up(rewards: list[list[float]], stopped: str = "", **series) -> dict:
    runs = [
        {"recipe": "R2", "seed": s, "stopped": stopped, "series": dict.fromkeys(figures.ROWS, z) | series}
        for s, z in enumerate(rewards)
    ]  # fmt: skip
    return {"figure": "9", "runs": runs}


def test_summary_by_hand():
    """Two seeds, 0.4 to 0.8 and 0.4 to 0.1: mean 0.45 in [0.1, 0.8], best (0.8 + 0.4) / 2, one halved and diverged; one
    that stopped counts as diverged. And the row that says so."""
    results = made_up([[0.4] * 5 + [0.8] * 5, [0.4] * 5 + [0.1] * 5])
    z = figures.summary(results)["R2"]
    found = [
        round(z[k], 9) for k in ("begin", "best", "end", "least", "largest", "halved", "diverged")
    ]
    assert found == [0.4, 0.6, 0.45, 0.1, 0.8, 1, 1] and z["seeds"] == 2
    assert figures.summary(made_up([[0.4] * 10], "step 3: stopped"))["R2"]["diverged"] == 1
    row = "| 9 | R2 | 0.40 | 0.60 | 0.45 [0.10, 0.80] | 4.5e-01 | 0.450 | 1 of 2 | 1 of 2 |"
    assert figures.rows(results) == [row]


def test_when_a_run_halves_by_hand():
    """One run falls at point 10, one never does, one at once. Catches a fall that is seen only at the end."""
    fall, stay, at_once = [0.8] * 10 + [0.0] * 5, [0.8] * 15, [0.8, 0.0, 0.0] + [0.0] * 12
    runs = made_up([fall, stay, at_once])["runs"]
    assert [figures.halves_at(r) for r in runs] == [11, None, 2]


@pytest.mark.slow  # 60 s
def test_a_figure_in_small(tiny, lottery_file, tmp_path, monkeypatch):
    """Two recipes, one seed, 32 updates on the tiny model by real runs: a drawn figure and a row for each; a second start
    runs nothing again, and a run that was lost from the JSON alone is read, not repeated. Catches a driver that fails
    after an hour of runs."""
    small = figures.Figure("t", 1, 8, {"MiniRL": "", "R3": figures.R3})
    monkeypatch.setattr(figures, "FIGURES", {"9": small})
    monkeypatch.setattr(figures, "UPDATES", 32)
    monkeypatch.setattr(figures, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(figures, "cold_start", lambda flags: None)
    model = f"--model {tiny()} --data {lottery_file}"
    monkeypatch.setattr(figures, "REGIME", f"{figures.REGIME} {model}")
    results = figures.make("9", None, 2, tmp_path)
    figures.draw(results, tmp_path / "figure_9.png")
    assert (tmp_path / "figure_9.png").read_bytes().startswith(b"\x89PNG")
    assert [row.split(" | ")[1] for row in figures.rows(results)] == ["MiniRL", "R3"]
    for r in results["runs"]:
        assert {len(z) for z in r["series"].values()} == {4} and not r["stopped"], r
    lost = json.loads((tmp_path / "figure_9.json").read_text())
    first = lost["runs"].pop(0)
    (tmp_path / "figure_9.json").write_text(json.dumps(lost))
    steps = [p.stat().st_mtime for p in sorted(tmp_path.glob("runs/*/metrics.jsonl"))]
    again = figures.make("9", None, 2, tmp_path)["runs"][-1]
    assert again["series"] == first["series"]
    assert steps == [p.stat().st_mtime for p in sorted(tmp_path.glob("runs/*/metrics.jsonl"))]


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_readme_quotes_the_recorded_figures(path):
    """Each recipe's row in launch/results/README.md is what the committed JSON gives; every seed is there, and no
    run was dropped, in the grids neither."""
    results = json.loads(path.read_text())
    figure = figures.FIGURES[results["figure"]]
    found = [(r["recipe"], r["seed"]) for r in results["runs"]]
    assert sorted(found) == sorted(
        (z, seed) for z in figure.recipes for seed in range(figure.seeds)
    )
    name, updates = results["figure"], results["updates"]
    for r in results["runs"]:
        assert r["flags"] == figures.command_of(name, r["recipe"], r["seed"], updates)
        assert r["stopped"] or {len(z) for z in r["series"].values()} == {updates // figures.BIN}
    if "grid" not in name:
        for row in figures.rows(results):
            assert row in README, row
    assert path.with_suffix(".png").is_file()


def test_guard_quotes_the_largest_recorded_kl():
    """The maximum that log.Watch's docstring names is the records', and below what it stops at. Catches a number that
    outlived its runs, and a watch that would stop a run of the figures for its coarse weights."""
    runs = [r for p in RECORDED for r in json.loads(p.read_text())["runs"]]
    largest = max(max(figures.known(r["series"]["kl_rollout_train_k3"])) for r in runs)
    assert f"the largest mean of 8 updates is {largest:.2f}." in log.Watch.__doc__
    assert largest < log.Watch.FLOOR
