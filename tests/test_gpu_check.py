"""launch/gpu_check.py, every stage, unchanged, on this machine's CPUs at toy size; and that it can fail."""

import re
import subprocess
import sys

import pytest
from conftest import ONE, ROOT, launch, needs_cpus

SCRIPT = "launch/gpu_check.py"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """What it prints for all four stages."""
    out = tmp_path_factory.mktemp("gpu-check")
    return launch([sys.executable, SCRIPT, "--size", "small", "--out", str(out)]).stdout


@pytest.mark.slow  # 100 s
def test_every_stage_runs_and_holds_what_it_measures(table):
    """Kernels against float64, an update against fp32, the engine over three cycles in two precisions and with two
    runners, the loop: ten parts, each "ok" with its rows. Catches a stage that outlived a function it calls.
    """
    parts = re.findall(r"^(\w+)(?: [\w-]+)*: (\w+), \d+ s$", table, re.M)
    stages = ["kernels"] + ["training"] + ["parity"] * 4 + ["loop"] * 3
    assert parts == [(stage, "ok") for stage in stages], table
    assert table.splitlines()[-1] == "ok" and "NOT AS EXPECTED" not in table
    assert len(re.findall(r"^  mean .* cycle [012]$", table, re.M)) == 12, table
    assert len(re.findall(r"^  hidden ", table, re.M)) == 4
    assert len(re.findall(r"^  gradient .* update_cosine ", table, re.M)) == 2
    assert len(re.findall(r"^  layers ", table, re.M)) == 3


def test_the_stages_that_need_no_engine(tmp_path):
    """Kernels against float64, and an update, plain and offloaded, against fp32: ok, exit code 0."""
    done = launch([*ONE, SCRIPT, "kernels", "training", "--size", "small", "--out", str(tmp_path)])
    assert re.findall(r"^(\w+): (\w+), \d+ s$", done.stdout, re.M) == [
        ("kernels", "ok"),
        ("training", "ok"),
    ]
    assert len(re.findall(r"^  gradient .* update_cosine ", done.stdout, re.M)) == 2


def test_a_part_that_fails_stops_no_other(tmp_path):
    """A layer that is wrong (each expert's output halved) is found by kernels and training; both run, exit code 1."""
    needs_cpus()
    broken = tmp_path / "moe.py"
    text = (ROOT / "moe.py").read_text()
    line = "torch.zeros_like(x).index_add(0, token, y)"
    assert text.count(line) == 1
    broken.write_text(text.replace(line, f"{line} * (0.5 if x.dtype == torch.bfloat16 else 1)"))
    for name in ("launch", "loss.py", "replay.py", "rollout.py", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "launch").unlink()
    (tmp_path / "launch").mkdir()
    for path in (ROOT / "launch").iterdir():
        target = tmp_path / "launch" / path.name
        target.write_text(path.read_text()) if path.suffix == ".py" else target.symlink_to(path)
    command = [sys.executable, SCRIPT, "kernels", "training", "--size", "small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^(\w+): FAILED \(1\)", done.stdout, re.M) == ["kernels", "training"]
    assert done.stdout.count("NOT AS EXPECTED") >= 6


def test_a_part_past_its_limit_is_ended(tmp_path, monkeypatch):
    """-9, with all that it started. Catches a stage that hangs and takes the others' time."""
    from launch import gpu_check

    code = gpu_check.run(["-c", "import time; time.sleep(60)"], (tmp_path / "log").open("w"), 1)
    assert code == -9


def test_an_unknown_stage_is_named():
    done = launch([sys.executable, SCRIPT, "speed"], ok=False)
    assert done.returncode == 2 and "no stage speed, only kernels, training" in done.stderr
