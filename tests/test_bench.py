"""launch/bench.py at its smallest sizes: it runs, has every row, and both sides of its comparison compute the same."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from launch import bench

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    """The JSON of one smallest run, whatever else the machine does."""
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, "launch/bench.py", "--smallest", "--no-trl", f"--out={out}"]
    command += ["--threads=1", "--busy=1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads(out.read_text())


def test_every_row_has_sound_figures(record):
    """Rows 1 to 4 are there, and no figure is missing, negative, infinite or NaN."""
    rows = {line["row"] for line in record["lines"]}
    assert rows == {1, 2, 3, 4}, rows
    for line in record["lines"]:
        for figure in (line["ours"], line["other"]):
            alone = figure is None and line["row"] == 3  # without TRL
            assert alone or (math.isfinite(figure) and figure > 0), line
        assert line["ratio"] is None or math.isfinite(line["ratio"]), line
    assert record["threads"] == 1 and set(record["others"]) and record["seconds"] > 0


def test_both_sides_compute_the_same_gradient(record):
    """Row 1 compares like with like: the gradients of both sides agree, and so do the log-probs.

    Catches padding that leaks in, other positions, another objective, weights that were not the same.
    """
    limits = {"fp32": (1e-4, 1e-4), "bf16": (0.1, 0.05)}  # bf16: a few experts flip
    cases = [line for line in record["lines"] if line["row"] == 1]
    assert len(cases) == 4
    for line in cases:
        gradient, logp = limits[line["case"].split()[1]]
        print(line["case"], line["more"])
        assert line["more"]["gradient_gap"] < gradient, line
        assert line["more"]["logp_gap"] < logp, line


def test_a_busy_machine_gives_no_ratios(capsys):
    """Others' use is counted, and a line without its ratio is neither met nor missed."""
    busy = bench.Line(1, "toy", 2.0, "tok/s", 1.0, "", None, ">= 1.3")
    assert bench.met(busy) == "" and "MISSED" not in bench.table([busy])
    assert bench.met(bench.replace(busy, ratio=1.2)) == "MISSED"
    assert bench.met(bench.replace(busy, ratio=1.3)) == "ok"
    watch = bench.Meanwhile()
    other = subprocess.Popen(
        [sys.executable, "-c", "import time\nt = time.time()\nwhile time.time() < t + 1: pass"]
    )
    begin = watch.begin[0]
    while bench.time.perf_counter() < begin + 0.8:
        bench.time.sleep(0.05)
    assert watch.others() > 0.5 / bench.os.cpu_count() * 0.5
    other.wait()


def test_fitted_exponents():
    """3 x^2 has exponent 2, a constant 0."""
    assert bench.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert bench.exponent([1, 2, 4], [7, 7, 7]) == pytest.approx(0, abs=1e-12)


def test_readme_quotes_the_recorded_run():
    """Every figure of the section on speed in launch/results/README.md is that of launch/results/bench.json, which an idle machine made."""
    record = json.loads((ROOT / "launch" / "results" / "bench.json").read_text())
    assert max(record["others"].values()) < 0.1
    lines = {(z["row"], z["case"]): z for z in record["lines"]}
    section = (
        (ROOT / "launch" / "results" / "README.md")
        .read_text()
        .partition("## Speed")[2]
        .partition("\n## ")[0]
    )
    for model in ("toy", "mid"):
        for dtype in ("fp32", "bf16"):
            equal, spread = (lines[1, f"{model} {dtype} {kind}"] for kind in ("equal", "spread"))
            cells = [f"{model}, {dtype}", f"{equal['ours']:,.0f}", f"{equal['ratio']:.2f}"]
            cells += [f"{spread['ours']:,.0f}", f"{spread['ratio']:.2f}"]
            assert f"| {' | '.join(cells)} |" in section, cells
    others = [lines[2, "generate"]["ratio"], lines[2, "generate, routes"]["ratio"]]
    step = next(z for z in record["lines"] if z["row"] == 3)
    for figure in (*others, step["ours"], step["other"], lines[4, "mid step, E 128"]["ratio"]):
        assert f" {figure:.2f} " in section.replace("\n", " "), figure
