"""Where x and the answer come from: JSON lines, tokens (imported by train.py)."""

from collections.abc import Sequence
from pathlib import Path

from rollout import addition, load_data


def load_prompts(name: str, model_dir: str | Path, room: int, seed: int, n=4096) -> list[dict]:
    """Examples of a file, or n of the task "addition", with "tokens"; prompts that do not fit into
    `room` tokens are dropped and counted. ValueError if none is left."""
    data = addition(n, seed) if name == "addition" else load_data(name)
    tokens = encode(model_dir, [example["prompt"] for example in data])
    fit = [e | {"tokens": t} for e, t in zip(data, tokens, strict=True) if 0 < len(t) <= room]
    if not fit:
        raise ValueError(f"{name}: no prompt fits into {room} tokens beside a whole response")
    if len(fit) < len(data):
        print(f"{name}: {len(data) - len(fit)} of {len(data)} prompts do not fit, dropped")
    return fit


def encode(model_dir: str | Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids by the folder's tokenizer, no chat template: an engine's size depends on them."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model_dir}: no usable tokenizer ({error})") from None
    if len(tokenizer) < 2:  # what transformers makes of a folder that holds none
        raise ValueError(f"{model_dir}: holds no tokenizer")
    return [tokenizer.encode(text) for text in texts]
