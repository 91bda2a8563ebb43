"""Rollouts on disk, and training on them without an engine.

With them one debugs a loss, or hands a batch to someone who has no vLLM. FOLDER/step-S.I-of-N.npz
holds what the I-th of N engines sampled in step S: plain arrays, ragged fields end to end, text and
the step's examples as JSON in bytes. Nothing is pickled, so reading a file runs nothing.
"""

import json
import re
import zipfile
from pathlib import Path

import numpy as np

from launch.lib.log import writing

RAGGED = ("tokens", "logp_rollout", "routes")  # lists of arrays, one a response
ARRAYS = ("prompt_lens", "truncated", "group_ids", "rewards")


def save(step: int, batch, examples: list[dict], c, layout) -> None:
    """Writes this engine's scored rollout.Rollout into --save-rollouts, if that is given."""
    if not c.save_rollouts or layout.member > 0:
        return
    arrays = {name: getattr(batch, name) for name in ARRAYS}
    for name in RAGGED:
        found = [piece for piece in getattr(batch, name) if piece is not None]
        arrays[name] = np.concatenate(found) if found else np.zeros((0, 0, 0), np.uint8)
        lengths = [-1 if piece is None else len(piece) for piece in getattr(batch, name)]
        arrays[f"{name}_lengths"] = np.array(lengths)
    for name, value in (("texts", batch.texts), ("examples", examples)):
        arrays[name] = np.frombuffer(json.dumps(value).encode(), np.uint8)
    arrays["temperature"] = np.array(c.temperature)

    final = Path(c.save_rollouts) / f"step-{step}.{layout.engine + 1}-of-{layout.engines}.npz"
    part = final.with_suffix(".part")
    with writing(part), open(part, "wb") as file:
        np.savez(file, **arrays)
    part.rename(final)


def stored(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays of these names, or all of them. ValueError names a file that is none of save's."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a saved rollout ({type(error).__name__})") from None


def read(paths: list[Path], record: type):
    """The batches of these files as one instance of `record`, which is rollout.Rollout."""
    found = [stored(path) for path in paths]
    values = {name: np.concatenate([arrays[name] for arrays in found]) for name in ARRAYS}
    values["texts"] = sum((json.loads(arrays["texts"].tobytes()) for arrays in found), [])
    for name in RAGGED:
        lengths = np.concatenate([arrays[f"{name}_lengths"] for arrays in found])
        flat = np.concatenate([arrays[name] for arrays in found])
        pieces = np.split(flat, np.cumsum(lengths.clip(0))[:-1])
        known = zip(lengths, pieces, strict=True)
        values[name] = [None if length < 0 else piece for length, piece in known]
    return record(**values)


def files(folder: str | Path, step: int) -> list[Path]:
    """The step's files, of all engines. ValueError if one is missing, or two runs left theirs."""
    found = sorted(Path(folder).glob(f"step-{step}.*-of-*.npz"))
    if not found:
        raise ValueError(f"--load-rollouts {folder}: holds no step {step}")
    engines = [tuple(map(int, re.findall(r"\d+", path.name)[1:])) for path in found]
    if sorted(engines) != [(i + 1, len(found)) for i in range(len(found))]:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"--load-rollouts {folder}: no complete step {step}, only {names}")
    return found


def check(c, config, folder: Path | None) -> None:
    """Checks --save-rollouts and --load-rollouts of a run that goes on from a checkpoint's folder.

    Raises ValueError unless the first can be written and holds no other run, and the second has all
    steps to come, the first of them sampled by such a model at this temperature.
    """
    if c.save_rollouts:
        try:
            Path(c.save_rollouts).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise ValueError(f"--save-rollouts {c.save_rollouts}: {why}") from None
        if not c.resume and any(Path(c.save_rollouts).glob("step-*.npz")):
            raise ValueError(f"--save-rollouts {c.save_rollouts}: holds rollouts already")

    steps = range(int(folder.name[5:]) if folder else 0, c.steps)
    if not c.load_rollouts or not steps:
        return
    first = [files(c.load_rollouts, step)[0] for step in steps][0]
    arrays = stored(first, "temperature", "tokens", "routes")
    if arrays["temperature"] != c.temperature:
        raise ValueError(f"--temperature {c.temperature}: {first} has {arrays['temperature']}")
    shape = arrays["routes"].shape[1:]  # (L, K), or (0, 0) without routes
    routes = (config.num_hidden_layers, config.num_experts_per_tok)
    possible = {(0, 0), routes} if config.has_experts else {(0, 0)}
    if arrays["tokens"].max() >= config.vocab_size or shape not in possible:
        raise ValueError(f"--load-rollouts {first}: sampled from another model than {c.model}")
    if c.keeps_routes(config) and shape == (0, 0):
        why = "without routes: add --no-record-routes, and no --replay R3"
        raise ValueError(f"--load-rollouts {first}: sampled {why}")


class Recorded:
    """Stands in the engine's place and hands out what an engine has sampled."""

    dtype = stale = None

    def __init__(self, folder: str | Path, record: type):
        self.folder = folder
        self.record = record

    def examples(self, step: int) -> list[dict]:
        return json.loads(stored(files(self.folder, step)[0], "examples")["examples"].tobytes())

    def generate(self, prompts, group_size, *, seed, first_prompt, **_):
        """The scored responses to these prompts in step seed[1], in the order of sampling."""
        batch = read(files(self.folder, seed[1]), self.record)
        ours = range(first_prompt, first_prompt + len(prompts))
        return batch.select([b for b, group in enumerate(batch.group_ids) if group in ours])

    def sync(self, weights) -> None:
        """There are no weights to move."""

    def sleep(self) -> None:
        """There is nothing to drop."""

    close = sleep
