"""JSON lines, and what their fields may be called: the names that common math and chat sets use (rollout.load_data).

    prompt    "prompt", "problem" or "question", text; or "messages" (or a list under "prompt"), a chat
    answer    "answer", "solution" or "ground_truth"; "ground_truth" inside "reward_model"; else the chat's last reply

The first that is there counts, in this order. What grade.py makes of an answer is its own matter.
"""

import json
from collections.abc import Iterator
from pathlib import Path

PROMPTS = ("prompt", "problem", "question", "messages")
ANSWERS = ("answer", "solution", "ground_truth")


def json_lines(path: str | Path) -> Iterator[tuple[int, object]]:
    """(number, value) of each line that is not blank; a BOM and CRLF are fine. ValueError names file and line."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON in UTF-8 ({error})") from None
        yield number, value


def example(row: object) -> dict:
    """A row with "prompt" and "answer" as strings; of a chat also "messages", up to the last user's turn, which is the
    prompt. All other keys stay. ValueError says what is missing."""
    row = dict(row) if isinstance(row, dict) else {}
    key = next((k for k in PROMPTS if row.get(k) is not None), "prompt")
    value, answers = row.get(key), [row.get(k) for k in ANSWERS]
    if isinstance(value, list):
        row["messages"], value, reply = chat(value)
        answers.append(reply)
    if isinstance(checked := row.get("reward_model"), dict):
        answers.insert(len(ANSWERS), checked.get("ground_truth"))
    answer = next((a for a in answers if a is not None), None)
    row |= {"prompt": text(value, PROMPTS), "answer": text(answer, ANSWERS)}
    return row


def text(value: object, names: tuple[str, ...]) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        others = ", ".join(map(repr, names[1:]))
        raise ValueError(f"needs an object with {names[0]!r} (or {others}), string or number")
    return str(value)


def chat(turns: list) -> tuple[list[dict], str, str | None]:
    """Turns up to the last of a user, the text of that one, and the reply behind it, if any."""
    fine = [isinstance(t, dict) and isinstance(t.get("content"), str) for t in turns]
    if not all(fine) or not any(t.get("role") == "user" for t in turns):
        raise ValueError("messages must be {'role', 'content'} objects, one of them by the user")
    last = max(i for i, t in enumerate(turns) if t.get("role") == "user")
    reply = turns[last + 1]["content"] if len(turns) > last + 1 else None
    return turns[: last + 1], turns[last]["content"], reply
