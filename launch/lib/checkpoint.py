"""What a run can go on from, OUT/checkpoints/step-N, and when it is asked to stop (Signals).

A checkpoint is safetensors and JSON, so that loading one executes nothing. Each rank writes the
rows that it holds, a file a layer; any number of ranks reads them. Learning rate, data order and
every seed follow from the step, so they are not stored.
"""

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launch.lib.flags import flag
from launch.lib.log import writing

KEEP = 2  # newest checkpoints that stay on disk
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP_FILES = ("metrics.jsonl", "samples.jsonl")
EVAL_FILES = ("eval.jsonl", "eval_problems.jsonl")


class Signals:
    """Lets a step end after SIGTERM or Ctrl-C. A second Ctrl-C ends the process at once.

    torchrun sends its ranks a copy of the first Ctrl-C; within 2 seconds that is no second one.
    """

    def __init__(self):
        self.received = 0  # the signal's number
        self.when = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame) -> None:
        if self.received and number == signal.SIGINT and time.monotonic() > self.when + 2:
            os._exit(128 + number)
        if not self.received:
            self.received = number
            self.when = time.monotonic()
            os.write(2, f"\n{signal.Signals(number).name}: saving after this step\n".encode())

    def asked(self) -> int:
        """The signal's number on every rank once one rank has got it, else 0. A collective."""
        return max(gather_object([self.received]))


# --- before a run


def saved(out: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [p for p in (out / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name[5:])


def open_folder(out: Path, resume: str, shapes: dict[str, tuple[int, ...]]) -> Path | None:
    """Makes --out, and returns the checkpoint to go on from, if there is one.

    `shapes` are those of the model's parameters. Raises ValueError if --out cannot be written or
    holds another run, or if the checkpoint is not of this model. Changes nothing that is there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").touch()
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None

    used = (out / "metrics.jsonl").exists()
    if used and not resume:
        raise ValueError(f"--out {out}: holds a run; add --resume auto or take another folder")
    if resume in ("", "auto"):
        folder = saved(out)[-1] if resume and saved(out) else None
    else:
        folder = Path(resume)
        if used and folder.resolve().parent != (out / "checkpoints").resolve():
            raise ValueError(f"--out {out}: holds a run, and --resume {folder} belongs to another")
    if folder:
        check(folder, shapes)
    return folder


def check(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Checks that a checkpoint is whole and has parameters of these shapes, and their moments.

    Reads headers only. Raises ValueError, which names the file or tensor.
    """
    if not re.fullmatch(r"step-\d+", folder.name):
        raise ValueError(f"--resume {folder}: not a checkpoint of train.py")
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

    wanted = {f"{k}.{name}": list(s) for name, s in shapes.items() for k in ("weight", *MOMENTS)}
    for name in [*wanted, *found]:
        size = list(found[name].size) if name in found else None
        if size != wanted.get(name):
            raise ValueError(f"{folder}: {name} is {size}, the model's is {wanted.get(name)}")
        if sum(math.prod(chunk.sizes) for chunk in found[name].chunks) != math.prod(size):
            raise ValueError(f"{folder}: parts of {name} are missing")


def read_record(folder: Path) -> tuple[int, int, dict]:
    """The steps and gradient updates that led to a checkpoint, and the flags of its run."""
    record = json.loads((folder / "run.json").read_text())
    return int(record["step"]), int(record["updates"]), dict(record["config"])


def finished(out: Path, folder: Path | None, steps: int) -> bool:
    """True if `folder` is the newest checkpoint, has the last step, and was exported since."""
    export = out / "hf"
    newest = [path.resolve() for path in saved(out)[-1:]]
    if not folder or newest != [folder.resolve()] or not export.exists():
        return False
    return steps <= step_of(folder) and export.stat().st_mtime >= folder.stat().st_mtime


# --- saving and resuming


@contextmanager
def replacing(final: Path, acc: Accelerator) -> Iterator[Path]:
    """A path beside `final` to write a folder to; the folder takes the place of `final` at the end.

    So a folder of that name is always complete. A collective.
    """
    part = final.with_suffix(".part")
    if acc.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    acc.wait_for_everyone()
    with writing(part):
        yield part
    acc.wait_for_everyone()
    if acc.is_main_process:
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    acc.wait_for_everyone()


def training_state(model, optimizer) -> dict[str, Tensor]:
    """What updates change, by name: weights and Adam's moments, each rank's own rows."""
    state = {}
    for name, p in model.named_parameters():
        state[f"weight.{name}"] = p.detach()
        state |= {f"{moment}.{name}": optimizer.state[p][moment] for moment in MOMENTS}
    return state


def save(step: int, model, optimizer, c, acc: Accelerator) -> None:
    """Writes OUT/checkpoints/step-N and removes the oldest beyond KEEP. A collective."""
    tensors = training_state(model, optimizer)
    file_of = {}  # one for each layer, one for the rest
    for name in tensors:
        layer = re.findall(r"\d+", name) or [-1]
        file_of[name] = int(layer[0]) + 2

    checkpoints = Path(c.out) / "checkpoints"
    with replacing(checkpoints / f"step-{step}", acc) as part:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(part, file_of, 1, True))
        if acc.is_main_process:
            updates = int(next(iter(optimizer.state.values()))["step"])
            record = {"step": step, "updates": updates, "config": vars(c)}
            (part / "run.json").write_text(json.dumps(record))
    if acc.is_main_process:
        for old in saved(Path(c.out))[:-KEEP]:
            discard(old)
    acc.wait_for_everyone()


def load(model, optimizer, folder: Path) -> int:
    """Loads a checkpoint, written on any number of ranks. Returns its step. A collective."""
    reader = dcp.HuggingFaceStorageReader(folder)
    dcp.load(training_state(model, optimizer), storage_reader=reader)
    step, updates, _ = read_record(folder)
    for state in optimizer.state.values():
        state["step"].fill_(updates)
    return step


def resume(model, optimizer, folder: Path | None, c, acc: Accelerator) -> int:
    """Loads the checkpoint, if there is one, and takes back what came after it in --out.

    Returns the step to go on with. A collective.
    """
    step = load(model, optimizer, folder) if folder else 0
    before = read_record(folder)[2] if folder else {}
    acc.wait_for_everyone()
    if acc.is_main_process:
        rewind(Path(c.out), step)
        for name, now in vars(c).items():  # a run may go on with another --lr, but not unnoticed
            if name not in ("out", "resume", "steps") and before.get(name, now) != now:
                print(f"{flag(name)} {now}: was {before[name]} up to step {step}")
    return step


def rewind(out: Path, step: int) -> None:
    """Takes back what a run left of `step` and later, before those steps are run again.

    That is rows, a torn last line, and checkpoints. A file that would lose all its rows becomes
    *.bak.
    """
    for later in reversed(saved(out)):
        if step_of(later) > step:
            discard(later)
    for name in STEP_FILES + EVAL_FILES:
        path = out / name
        first_lost = step + (name in EVAL_FILES)  # an evaluation at `step` saw the checkpoint
        lines = list(path.open(encoding="utf-8")) if path.exists() else []
        rows = [line for line in lines if line.endswith("\n") and is_json(line)]
        kept = [line for line in rows if json.loads(line)["step"] < first_lost]
        if rows and not kept:
            print(f"{path}: kept as {name}.bak, since no checkpoint goes with it")
            path.rename(out / f"{name}.bak")
        elif len(kept) < len(lines):
            part = path.with_suffix(".part")
            with writing(part):
                part.write_text("".join(kept), encoding="utf-8")
            part.rename(path)


def discard(folder: Path) -> None:
    """Removes a checkpoint under another name, so that a kill leaves no half of one."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(folder.rename(part), ignore_errors=True)


def is_json(line: str) -> bool:
    """True for a whole row, False for what a kill left of one."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
