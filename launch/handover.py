"""Rollouts on disk, and training on them without an engine (imported by train.py): to debug a loss, or to hand a batch
to someone who has no vLLM.

FOLDER/step-S.I-of-N.npz is what the I-th of N engines sampled in step S: plain arrays, ragged fields end to end, text
and the step's examples as JSON in bytes. Nothing is pickled, so reading a file runs nothing.
"""

import json
import re
import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from launch import guard, models
from rollout import Rollout


def save(step: int, batch: Rollout, examples: list[dict], c, acc: Accelerator) -> None:
    """Writes this engine's batch into --save-rollouts, if any; one rank of each engine does."""
    engines, this = acc.num_processes // c.rollout_tp, acc.process_index // c.rollout_tp
    if not c.save_rollouts or acc.process_index % c.rollout_tp:
        return
    known = [r for r in batch.routes if r is not None]
    arrays = {
        "lengths": np.array([len(t) for t in batch.tokens]),
        "tokens": np.concatenate(batch.tokens),
        "logp_rollout": np.concatenate(batch.logp_rollout),
        "route_rows": np.array([-1 if r is None else len(r) for r in batch.routes]),
        "routes": np.concatenate(known) if known else np.zeros((0, 0, 0), np.uint8),
        "texts": packed(batch.texts),
        "examples": packed(examples),
        "temperature": np.array(c.temperature),
    }
    for name in ("prompt_lens", "truncated", "group_ids", "rewards", "failed"):
        arrays[name] = getattr(batch, name)
    final = Path(c.save_rollouts) / f"step-{step}.{this + 1}-of-{engines}.npz"
    for old in final.parent.glob(f"step-{step}.*-of-*.npz"):
        if not old.name.endswith(f"-of-{engines}.npz"):  # of a run on another number of engines
            old.unlink(missing_ok=True)
    part = final.with_suffix(".part")
    with guard.writing(part), open(part, "wb") as file:
        np.savez(file, **arrays)
    part.rename(final)


def packed(value: list) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def stored(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays of these names, all without any. ValueError names a file that is no saved rollout."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a saved rollout ({type(error).__name__})") from None


def read(path: Path) -> Rollout:
    """The batch in a file."""
    a = stored(path)
    ends, responses = np.cumsum(a["lengths"]), np.cumsum(a["lengths"] - a["prompt_lens"])
    routes = np.split(a["routes"], np.cumsum(a["route_rows"].clip(0))[:-1])
    lists = {
        "tokens": np.split(a["tokens"], ends[:-1]),
        "logp_rollout": np.split(a["logp_rollout"], responses[:-1]),
        "routes": [None if n < 0 else r for n, r in zip(a["route_rows"], routes, strict=True)],
        "texts": json.loads(a["texts"].tobytes()),
    }
    return Rollout(**lists, **{f.name: a[f.name] for f in fields(Rollout) if f.name not in lists})


def files(folder: str | Path, step: int) -> list[Path]:
    """The step's files, of all engines. ValueError where one is missing or two runs left theirs."""
    found = sorted(Path(folder).glob(f"step-{step}.*-of-*.npz"))
    parts = [tuple(map(int, re.findall(r"\d+", path.name.split(".")[1]))) for path in found]
    if not found:
        raise ValueError(f"--load-rollouts {folder}: holds no step {step}")
    if sorted(parts) != [(i + 1, len(found)) for i in range(len(found))]:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"--load-rollouts {folder}: no complete step {step}, only {names}")
    return found


def check(c, config, begun: Path | None) -> None:
    """ValueError unless --save-rollouts can be written and holds no other run, and --load-rollouts has the steps from
    the checkpoint on, the first sampled by such a model at this temperature."""
    begin = int(begun.name[5:]) if begun else 0
    if c.save_rollouts:
        try:
            Path(c.save_rollouts).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise ValueError(f"--save-rollouts {c.save_rollouts}: {why}") from None
        if not c.resume and any(Path(c.save_rollouts).glob("step-*.npz")):
            raise ValueError(f"--save-rollouts {c.save_rollouts}: holds rollouts already")
    if not c.load_rollouts:
        return
    for step in range(begin, c.steps):
        files(c.load_rollouts, step)
    if begin >= c.steps:
        return
    found = files(c.load_rollouts, begin)[0]
    a = stored(found, "temperature", "tokens", "routes")
    if a["temperature"] != c.temperature:
        raise ValueError(f"--temperature {c.temperature}: {found} has {a['temperature']}")
    none, has = (0, 0), a["routes"].shape[1:]
    shapes = {none, (config.num_hidden_layers, config.num_experts_per_tok)}
    if a["tokens"].max() >= config.vocab_size or has not in (
        shapes if models.routed(config) else {none}
    ):
        raise ValueError(f"--load-rollouts {found}: sampled from another model than {c.model}")
    if models.records_routes(c, config) and has == none:
        why = "without routes: add --no-record-routes, and no --replay R3"
        raise ValueError(f"--load-rollouts {found}: sampled {why}")


class Recorded:
    """In an engine's place: hands out what one has sampled. `sync` has no weights to move, `sleep` nothing to drop."""

    dtype = stale = None

    def __init__(self, folder: str | Path):
        self.folder = folder

    def examples(self, step: int) -> list[dict]:
        return json.loads(stored(files(self.folder, step)[0], "examples")["examples"].tobytes())

    def generate(self, prompts, group_size, *, seed, first_prompt, **_) -> Rollout:
        """The responses to these prompts of the step seed[1], scored, in the order in which they were sampled."""
        batches = [read(path) for path in files(self.folder, seed[1])]
        ours = range(first_prompt, first_prompt + len(prompts))
        parts = [b.select([r for r in range(len(b)) if b.group_ids[r] in ours]) for b in batches]
        lists = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Rollout)}
        joined = {
            name: sum(values, []) if isinstance(values[0], list) else np.concatenate(values)
            for name, values in lists.items()
        }
        return Rollout(**joined)

    def sync(self, weights) -> None:
        pass

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass
