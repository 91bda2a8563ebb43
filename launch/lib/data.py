"""Where x and its answer come from: JSON lines, or the built-in task; and x as tokens.

A row of a data file is a JSON object with the names that common math and chat sets use:

    prompt    "prompt", "problem" or "question", text; or a chat in "messages" (or in "prompt")
    answer    "answer", "solution" or "ground_truth"; "ground_truth" inside "reward_model";
              else the chat's last reply

The first that is there counts, in this order. Every other key of the row stays with the example.
"""

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from launch.lib.flags import flag, line

PROMPTS = ("prompt", "problem", "question", "messages")
ANSWERS = ("answer", "solution", "ground_truth")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")  # of a model's repository


# --- rows


def json_lines(path: str | Path) -> Iterator[tuple[int, object]]:
    """(line number, value) of each line that is not blank; a BOM and CRLF are fine.

    Raises ValueError, which names file and line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON in UTF-8 ({error})") from None
        yield number, value


def example_of(row: object) -> dict:
    """The row with "prompt" and "answer" as strings; ValueError says what is missing.

    Of a chat "messages" holds the turns up to the last one of the user, which is the prompt.
    """
    example = dict(row) if isinstance(row, dict) else {}
    key = next((name for name in PROMPTS if example.get(name) is not None), "prompt")
    prompt = example.get(key)
    answers = [example.get(name) for name in ANSWERS]
    reward_model = example.get("reward_model")
    if isinstance(reward_model, dict):
        answers.append(reward_model.get("ground_truth"))
    if isinstance(prompt, list):
        example["messages"], reply = split_chat(prompt)
        prompt = example["messages"][-1]["content"]
        answers.append(reply)

    answer = next((a for a in answers if a is not None), None)
    example["prompt"] = text_of(prompt, PROMPTS)
    example["answer"] = text_of(answer, ANSWERS)
    return example


def text_of(value: object, names: tuple[str, ...]) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        others = ", ".join(map(repr, names[1:]))
        raise ValueError(f"needs an object with {names[0]!r} (or {others}), string or number")
    return str(value)


def split_chat(turns: list) -> tuple[list[dict], str | None]:
    """The turns up to the last one of the user, and the reply behind it, if there is one."""
    well_formed = [isinstance(t, dict) and isinstance(t.get("content"), str) for t in turns]
    if not all(well_formed) or not any(turn.get("role") == "user" for turn in turns):
        raise ValueError("messages must be {'role', 'content'} objects, one of them by the user")
    last = max(i for i, turn in enumerate(turns) if turn.get("role") == "user")
    reply = turns[last + 1]["content"] if len(turns) > last + 1 else None
    return turns[: last + 1], reply


# --- sources


def load_data(path: str | Path) -> list[dict]:
    """The examples of a file of JSON lines. ValueError names file and line."""
    examples = []
    for number, row in json_lines(path):
        try:
            examples.append(example_of(row))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not examples:
        raise ValueError(f"{path}: no examples in it")
    return examples


def addition(n: int, seed: int, digits: int = 4) -> list[dict]:
    """The built-in task: n sums of two uniform numbers, zero-padded. Same seed, same list."""
    rng = random.Random(seed)
    examples = []
    for _ in range(n):
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        prompt = f"{a:0{digits}}+{b:0{digits}}="
        examples.append({"prompt": prompt, "answer": f"{a + b:0{digits + 1}}"})
    return examples


# --- prompts of a run


def prepare(c, context: int) -> tuple[list[dict], list[dict]]:
    """The examples of --data and --eval-data for a model that sees `context` tokens.

    A list is empty if the run does not need it.
    """
    room = context - c.max_new_tokens
    if room < 1:
        raise ValueError(
            f"{flag('max_new_tokens')} {c.max_new_tokens}: leaves no room for a prompt"
        )
    data = [] if c.load_rollouts or not c.data else load(c.data, c, room, c.seed, 4096)
    held_out = load(c.eval_data, c, room, 10**8, 256) if c.eval_data else []
    return data, held_out


def load(names: str, c, room: int, seed: int, n: int) -> list[dict]:
    """load_prompts of each name in a list with commas. An example's name stands under "data"."""
    examples = []
    for name in names.split(","):
        name = name.strip()
        if not name:
            raise ValueError(f"data {names!r}: an empty name beside a comma")
        found = load_prompts(name, c.model, room, seed, n, c.prompt_template)
        examples += [example | {"data": name} for example in found]
    return examples


def load_prompts(
    name: str, model_dir: str | Path, room: int, seed: int, n: int = 4096, template: str = ""
) -> list[dict]:
    """Examples with "tokens": of a file, or n of the task "addition".

    Prompts that do not fit into `room` tokens are dropped and counted. ValueError if none is left.
    """
    examples = addition(n, seed) if name == "addition" else load_data(name)
    tokenizer_of(model_dir)  # complains in its own words
    for number, example in enumerate(examples):
        try:
            example["tokens"] = tokenize(example, model_dir, template)
        except Exception as error:  # templates are programs: they raise what they like
            why = f"the chat template fails on example {number}"
            raise ValueError(f"{name}: {why} ({line(error)})") from None

    fitting = [example for example in examples if 0 < len(example["tokens"]) <= room]
    if not fitting:
        shortest = min(len(example["tokens"]) for example in examples)
        why = f"no prompt fits into {room} tokens beside a response (the shortest has {shortest})"
        raise ValueError(f"{name}: {why}")
    dropped = len(examples) - len(fitting)
    if dropped and os.environ.get("RANK", "0") == "0":
        print(f"{name}: {dropped} of {len(examples)} prompts do not fit, dropped")
    return fitting


def longest(examples: list[dict], c) -> int:
    """Tokens of the longest prompt with the longest response."""
    return max(len(example["tokens"]) for example in examples) + c.max_new_tokens


def pick(data: list[dict], step: int, c) -> list[dict]:
    """The P examples of a step. Epochs are shuffled by the seed and read one after the other."""
    first = step * c.prompts_per_step
    picked = []
    for i in range(first, first + c.prompts_per_step):
        epoch, index = divmod(i, len(data))
        picked.append(data[shuffled(len(data), c.seed, epoch)[index]])
    return picked


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(n), n)


# --- tokens


def tokenize(example: dict, model_dir: str | Path, template: str) -> list[int]:
    """The prompt's tokens: put into `template`, else into the model's chat template.

    Without either the text is taken as it is; the turns of a chat then stand on lines of their own.
    """
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
    """The folder's tokenizer. ValueError if the folder holds none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model_dir}: no usable tokenizer ({line(error)})") from None
    if len(tokenizer) < 2:  # what transformers makes of a folder that holds none
        raise ValueError(f"{model_dir}: holds no tokenizer")
    tokenizer.model_max_length = 10**9  # long prompts are dropped here, without its warning
    return tokenizer


def model_folder(name: str, wanted: Sequence[str] = MODEL_FILES) -> str:
    """`name` if it is a folder, else the folder where the hub's OWNER/MODEL of that name is stored.

    Fetches the `wanted` files of it. ValueError if that fails. Any other name comes back as it is.
    """
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=list(wanted))
    except Exception as error:  # of the HTTP client, the cache or the hub: many kinds
        why = "no such folder (launch/cold_start.py makes the toy's), and the hub gives none"
        raise ValueError(f"--model {name}: {why} of that name ({line(error)})") from None
