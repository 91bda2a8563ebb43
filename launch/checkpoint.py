"""What a run can go on from: OUT/checkpoints/step-N, and what belongs to it (imported by train.py).

A checkpoint is safetensors and JSON, so that loading one executes nothing. Each rank writes the rows that it holds, a
file a layer; any number of ranks reads them. Learning rate, data order and every seed follow from the step.
"""

import json
import math
import re
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from torch import Tensor

import moe
from launch import flags, guard

KINDS = ("weight", "exp_avg", "exp_avg_sq")


def saved(out: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [p for p in (out / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]))


def open_folder(
    out: Path, resume: str, shapes: dict[str, tuple[int, ...]], eval_only: bool = False
) -> Path | None:
    """Makes --out -> the checkpoint to go on from, if any; `shapes` are the model's parameters. ValueError where it
    can't be written, holds another run (to which an evaluation may add), or the checkpoint is none of this model.
    Changes nothing that is there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ("eval.jsonl" if eval_only else "config.json")).touch()
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None
    used, folder = (out / "metrics.jsonl").exists() and not eval_only, Path(resume)
    if resume in ("", "auto"):
        if used and not resume:
            raise ValueError(f"--out {out}: holds a run; add --resume auto or take another folder")
        if eval_only and resume and not saved(out):
            raise ValueError(f"--resume auto: --out {out} holds no checkpoint to evaluate")
        if not resume or not saved(out):
            return None
        folder = saved(out)[-1]
    if not re.fullmatch(r"step-\d+", folder.name):
        raise ValueError(f"--resume {folder}: not a checkpoint of train.py")
    if used and folder.resolve().parent != (out / "checkpoints").resolve():
        raise ValueError(f"--out {out}: holds a run, and --resume {folder} belongs to another")
    check(folder, {f"{kind}.{name}": s for name, s in shapes.items() for kind in KINDS})
    return folder


def finished(out: Path, folder: Path | None, steps: int) -> bool:
    """Has the run in `out` had its last step, and is its export that of the newest checkpoint, `folder`?"""
    if not folder or [folder.resolve()] != [p.resolve() for p in saved(out)[-1:]]:
        return False
    export = out / "hf"
    at_end = steps <= int(folder.name[5:]) and export.exists()
    return at_end and export.stat().st_mtime >= folder.stat().st_mtime


def discard(folder: Path) -> None:
    """Removes a checkpoint by way of another name: a kill leaves no half of one that passes for whole."""
    if folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(folder.rename(part), ignore_errors=True)


def rewind(out: Path, step: int) -> None:
    """Takes back what a run left of `step` and later, before those steps are run again: rows, a torn last line, and
    checkpoints, which belong to another future. Files that would lose everything are renamed to *.bak."""
    for later in reversed([p for p in saved(out) if int(p.name[5:]) > step]):
        discard(later)
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "eval_problems.jsonl"):
        gone = step + name.startswith("eval")  # an evaluation at `step` saw the checkpoint
        path = out / name
        lines = list(path.open(encoding="utf-8")) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n") and is_json(line)]
        kept = [line for line in whole if json.loads(line)["step"] < gone]
        if whole and not kept:
            print(f"{path}: kept as {name}.bak, since no checkpoint goes with it")
            path.rename(out / f"{name}.bak")
        elif len(kept) < len(lines):
            beside = path.with_suffix(".part")
            with guard.writing(beside):
                beside.write_text("".join(kept), encoding="utf-8")
            beside.rename(path)


def is_json(line: str) -> bool:
    """Is it a whole row, not what a kill left of one?"""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def check(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError naming the file or tensor of a checkpoint that is cut off, incomplete or of another model.

    `shapes` are the whole tensors' that it must hold. Reads headers only: a few bytes a file, nothing is executed.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: cannot be read ({error})") from None
    try:
        read_record(folder)
        found = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{folder}: not a checkpoint of train.py ({error!r})") from None
    for name in [*shapes, *found]:
        is_, should = found.get(name), shapes.get(name)
        if is_ is None or should is None or tuple(is_.size) != tuple(should):
            size = None if is_ is None else list(is_.size)
            raise ValueError(
                f"{folder}: {name} is {size}, the model's is {should and list(should)}"
            )
        if sum(math.prod(chunk.sizes) for chunk in is_.chunks) != math.prod(should):
            raise ValueError(f"{folder}: parts of {name} are missing")


def read_record(folder: Path) -> tuple[int, int, dict]:
    """Steps and gradient updates that led to a checkpoint, and the flags of its run."""
    record = json.loads((folder / "run.json").read_text())
    return int(record["step"]), int(record["updates"]), dict(record["config"])


def training_state(model, optimizer) -> dict[str, Tensor]:
    """Name -> what updates change: weights and Adam's moments themselves, of which each rank holds its rows."""
    state = {}
    for name, p in model.named_parameters():
        state[f"weight.{name}"] = p.detach()
        state |= {f"{kind}.{name}": optimizer.state[p][kind] for kind in KINDS[1:]}
    return state


def save(step: int, model, optimizer, c, acc: Accelerator) -> None:
    """OUT/checkpoints/step-N, written beside and renamed, so that a folder of that name is complete."""
    final = Path(c.out) / "checkpoints" / f"step-{step}"
    part = final.with_suffix(".part")
    if acc.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    acc.wait_for_everyone()
    tensors = training_state(model, optimizer)
    files = {n: int((re.findall(r"\d+", n) or [-1])[0]) + 2 for n in tensors}  # a file a layer
    with guard.writing(part):
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(part, files, 1, True))
    acc.wait_for_everyone()
    if acc.is_main_process:
        updates = int(next(iter(optimizer.state.values()))["step"])
        with guard.writing(part):
            record = {"step": step, "updates": updates, "config": vars(c)}
            (part / "run.json").write_text(json.dumps(record))
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in saved(Path(c.out))[: -c.keep]:
            discard(old)
    acc.wait_for_everyone()


def resume(model, optimizer, folder: Path | None, c, acc: Accelerator) -> int:
    """Loads a checkpoint, written on any number of ranks -> the step to go on with (0 without one)."""
    step = 0
    if folder:
        reader = dcp.HuggingFaceStorageReader(folder)
        dcp.load(training_state(model, optimizer), storage_reader=reader)
        step, updates, before = read_record(folder)
        for state in optimizer.state.values():
            state["step"].fill_(updates)
    acc.wait_for_everyone()
    if acc.is_main_process and not c.eval_only:
        rewind(Path(c.out), step)
        for name, now in vars(c).items():  # a run may go on with another --lr, but not unnoticed
            if step and name not in ("out", "resume", "steps") and before.get(name, now) != now:
                print(f"{flags.flag(name)} {now}: was {before[name]} up to step {step}")
    return step


def export(model, c, acc: Accelerator) -> None:
    """OUT/hf, the folder that vLLM and transformers load, streamed a tensor at a time."""
    final = Path(c.out) / "hf"
    part = final.with_suffix(".part")
    dtype = torch.float32 if c.precision == "fp32" else torch.bfloat16
    with guard.writing(part):
        moe.save_pretrained(model, part, dtype, like=c.model, write=acc.is_main_process)
    if acc.is_main_process:
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
