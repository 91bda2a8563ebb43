"""Both environments can be installed: the pins of each resolve against the package index, without a download."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNREACHED = ("dns error", "error sending request", "connection", "timed out", "offline")


def compile_pins(platform: str, constraints: Path) -> subprocess.CompletedProcess:
    """`uv pip compile` for Python 3.11 on Linux x86-64; skips where uv or the index cannot be reached."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not in .venv; launch/setup.sh installs it")
    command = [uv, "pip", "compile", "-", "-c", constraints, "--no-header", "--no-annotate"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    environment = dict(os.environ)
    if platform == "cpu" and "PIP_FIND_LINKS" in environment:  # where torch's CPU wheel may lie
        environment["UV_FIND_LINKS"] = environment["PIP_FIND_LINKS"]
    done = subprocess.run(
        command,
        input=requirements(platform),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    if done.returncode and any(word in done.stderr.lower() for word in UNREACHED):
        pytest.skip(f"no package index is reached: {done.stderr[-200:]}")
    return done


def requirements(platform: str) -> str:
    text = (ROOT / "requirements.txt").read_text()
    return text if platform == "cuda" else text.replace("\nvllm==", "\nvllm-cpu==")


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_the_pins_resolve(platform):
    """requirements.txt under constraints-PLATFORM.txt has a solution, and every package in it is pinned there.

    Catches a pin of one platform that contradicts the other's torch or vLLM, and an install that will differ next
    year because a package that is brought along is pinned nowhere.
    """
    constraints = ROOT / "launch" / f"constraints-{platform}.txt"
    done = compile_pins(platform, constraints)
    if done.returncode and platform == "cpu" and "torch==2.13.0+cpu" in done.stderr:
        pytest.skip("the index holds no torch for CPUs; setup.sh takes it from PyTorch's own")
    assert done.returncode == 0, done.stderr
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines(constraints)}
    found = {line.partition("==")[0] for line in done.stdout.splitlines()}
    removed = {"torchvision", "torchaudio", "torchcodec"}  # by setup.sh, from an install for CPUs
    missing = found - pins - (removed | {"setuptools"} if platform == "cpu" else set())
    assert not missing, missing


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def test_a_pin_of_the_other_platform_is_refused(tmp_path):
    """triton 3.9.0, which the CPU build may have, beside CUDA torch: no solution, as pip once found on a GPU machine.

    Catches a check that would pass whatever the pins are.
    """
    text = (ROOT / "launch" / "constraints-cuda.txt").read_text()
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(text.replace("triton==3.7.1", "triton==3.9.0"))
    done = compile_pins("cuda", wrong)
    assert done.returncode != 0 and "triton" in done.stderr
