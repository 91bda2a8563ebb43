"""What a model's folder holds: config.json, and safetensors with an index where they are several.

Reading and writing only. Which model that is, moe.py knows; what of it vLLM must be sent, rollout.py. Imports neither.
"""

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def settings(folder: str | Path) -> dict:
    """config.json. ValueError names the file where it cannot be read, or is no JSON object."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def named(hf: dict) -> dict:
    """A config.json under the names of transformers 4 (num_experts, rope_theta, rope_type), also where transformers 5
    wrote num_local_experts and rope_parameters; with what may be left out."""
    rope = (hf.get("rope_parameters") or {}) | (hf.get("rope_scaling") or {})
    found = {"decoder_sparse_step": 1, "tie_word_embeddings": False} | hf
    found["num_experts"] = hf.get("num_experts", hf.get("num_local_experts"))
    found["rope_theta"] = hf.get("rope_theta", rope.get("rope_theta"))
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    found["mlp_only_layers"] = tuple(hf.get("mlp_only_layers") or ())
    if not hf.get("head_dim") and hf.get("hidden_size") and hf.get("num_attention_heads"):
        found["head_dim"] = hf["hidden_size"] // hf["num_attention_heads"]
    return found


def values(found: dict, wanted: dict[str, type]) -> dict:
    """The values of `wanted` (name -> type). ValueError names one that is missing, of another type or not positive."""
    for name, kind in wanted.items():
        value = found.get(name)
        if value is None:
            raise ValueError(f"no value for {name}")
        if kind is int and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} = {value!r} is not a positive integer")
        if kind is float and not isinstance(value, int | float):
            raise ValueError(f"{name} = {value!r} is not a number")
    return {name: found[name] for name in wanted}


def headers(folder: str | Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name -> (file, shape) of each tensor in a folder, by the files' headers; less an lm_head that config.json ties
    to the embedding. Raises ValueError naming the file that is missing, cut off or no such file."""
    folder, files, found = Path(folder), {ONE_FILE}, {}
    tied = settings(folder).get("tie_word_embeddings")
    path = folder / INDEX
    try:
        if path.exists():
            files = set(json.loads(path.read_text())["weight_map"].values())
        for path in (folder / file for file in sorted(files)):
            with safe_open(path, framework="pt") as f:
                found |= {n: (path, tuple(f.get_slice(n).get_shape())) for n in list(f.keys())}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: weights cannot be read: {error!r}") from None
    if tied:
        found.pop("lm_head.weight", None)  # some folders store it all the same
    return found


def write(
    out: str | Path,
    weights: Iterator[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    config: dict,
    *,
    dtype,
    like: str | Path = "",
    shard_bytes: float = 5e9,
    here: bool = True,
) -> None:
    """Makes `out` a folder that vLLM and transformers load: `weights` as they come, `shapes` their names and shapes in
    that order, `config` for config.json, and the tokenizer files of the folder `like`.

    Not `here` walks the weights alone, for ranks that take part in gathering them. One file's tensors are on the host.
    """
    out = Path(out)
    ends = list(itertools.accumulate(math.prod(s) * dtype.itemsize for s in shapes.values()))
    by_size = itertools.groupby(zip(shapes, ends, strict=True), lambda z: z[1] // shard_bytes)
    shards = [[name for name, _ in group] for _, group in by_size]
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(files) > 1 else [ONE_FILE]
    if here:
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("model*.safetensors*"):
            old.unlink()
    for file, names in zip(files, shards, strict=True):
        some = itertools.islice(weights, len(names))
        shard = {name: w.to("cpu", copy=True) for name, w in some if here}
        if here:
            save_file(shard, out / file, metadata={"format": "pt"})
            (out / file).chmod(0o644)  # it comes readable by its owner alone
    if not here:
        return
    for path in Path(like).iterdir() if like else []:
        if path.suffix in (".json", ".jinja", ".txt") and "safetensors" not in path.name:
            shutil.copy(path, out)
    key = "dtype" if "dtype" in config else "torch_dtype"
    jsons = {"config.json": config | {key: str(dtype).removeprefix("torch.")}}
    if len(files) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        jsons[INDEX] = {"metadata": {"total_size": ends[-1]}, "weight_map": where}
    for name, content in jsons.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
