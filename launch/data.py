"""Where x and the answer come from: JSON lines, the hub, the built-in task; and x as tokens (imported by train.py)."""

import importlib
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

from launch import formats
from launch.flags import flag, line
from rollout import addition, load_data


def prepare(c, context: int) -> tuple[list[dict], list[dict]]:
    """The examples of --data and of --eval-data for a model that sees `context` tokens; none where a run needs none."""
    data, held_out = [], []
    if not (c.eval_only or c.load_rollouts):
        data = load(c.data, c, context - c.max_new_tokens, "max_new_tokens", c.seed, 4096)
    if c.eval_data:
        name = "eval_max_new_tokens" if c.eval_max_new_tokens else "max_new_tokens"
        held_out = load(c.eval_data, c, context - getattr(c, name), name, 10**8, 256)
    return data, held_out


def longest(examples: list[dict], c) -> int:
    """Tokens of the longest prompt with the longest response."""
    return max(len(e["tokens"]) for e in examples) + max(c.max_new_tokens, c.eval_max_new_tokens)


def load(names: str, c, room: int, limit: str, seed: int, n: int) -> list[dict]:
    """load_prompts of each name in a list with commas; an example's name stands under "data"."""
    if room < 1:
        raise ValueError(f"{flag(limit)} {getattr(c, limit)}: leaves no room for a prompt")
    if not all(split := [name.strip() for name in names.split(",")]):
        raise ValueError(f"data {names!r}: an empty name beside a comma")
    loaded = [(f, load_prompts(f, c.model, room, seed, n, c.prompt_template)) for f in split]
    return [example | {"data": name} for name, examples in loaded for example in examples]


def load_prompts(
    name: str, model_dir: str | Path, room: int, seed: int, n: int = 4096, template: str = ""
) -> list[dict]:
    """Examples of a file, of hf:NAME[:SPLIT], or n of the task "addition", with "tokens".

    Prompts that do not fit into `room` tokens are dropped and counted. ValueError if none is left.
    """
    if name == "addition":
        data = addition(n, seed)
    else:
        data = hub_rows(name) if name.startswith("hf:") else load_data(name)
    tokens = []
    tokenizer_of(model_dir)  # complains in its own words
    for number, example in enumerate(data):
        try:
            tokens.append(tokenize(example, model_dir, template))
        except Exception as error:  # templates are programs: they raise what they like
            why = f"the chat template fails on example {number}"
            raise ValueError(f"{name}: {why} ({line(error)})") from None
    fit = [e | {"tokens": t} for e, t in zip(data, tokens, strict=True) if 0 < len(t) <= room]
    if not fit:
        shortest = f"the shortest has {min(map(len, tokens), default=0)}"
        raise ValueError(
            f"{name}: no prompt fits into {room} tokens beside a response ({shortest})"
        )
    if len(fit) < len(data) and os.environ.get("RANK", "0") == "0":
        print(f"{name}: {len(data) - len(fit)} of {len(data)} prompts do not fit, dropped")
    return fit


def hub_rows(name: str) -> list[dict]:
    """The examples of hf:NAME[:SPLIT], by default its "train"; NAME may end in a configuration: openai/gsm8k/main.
    ValueError names what is wrong."""
    _, path, *split = name.split(":")
    if not importlib.util.find_spec("datasets"):
        raise ValueError(f"{name}: needs the datasets library (pip install datasets)")
    owner, *rest = path.split("/")
    config = rest.pop() if len(rest) == 2 and not Path(path).exists() else None
    path = path if Path(path).exists() else "/".join([owner, *rest])
    try:
        load = importlib.import_module("datasets").load_dataset  # optional, so not a requirement
        found = load(path, config, split=":".join(split) or "train")
    except Exception as error:  # as above
        raise ValueError(f"{name}: cannot be loaded ({line(error)})") from None
    examples = []
    for number, row in enumerate(found):
        try:
            examples.append(formats.example(row))
        except ValueError as error:
            raise ValueError(f"{name}: row {number} {error}") from None
    return examples


def tokenize(example: dict, model_dir: str | Path, template: str) -> list[int]:
    """The prompt's tokens: put into `template`, else into the model's chat template, else (it has none) as it is; the
    turns of a chat then stand in a line each."""
    tokenizer = tokenizer_of(model_dir)
    prompt = example["prompt"]
    chat = example.get("messages") or [{"role": "user", "content": prompt}]
    if template:  # no str.format: \boxed{} may stand in it
        return tokenizer.encode(template.replace("{prompt}", prompt))
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)  # the template wrote them
    return tokenizer.encode("\n".join(turn["content"] for turn in chat))


@lru_cache(maxsize=2)
def tokenizer_of(model_dir: str | Path):
    """The folder's tokenizer; ValueError where it holds none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model_dir}: no usable tokenizer ({line(error)})") from None
    if len(tokenizer) < 2:  # what transformers makes of a folder that holds none
        raise ValueError(f"{model_dir}: holds no tokenizer")
    tokenizer.model_max_length = 10**9  # what is too long is dropped here, without its warning
    return tokenizer
