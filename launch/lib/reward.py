r"""R(x, y): the rule of the built-in task, math-verify, or a function of yours.

    --reward path/to/file.py:function       def function(prompt, response, answer, example) -> float

prompt, response and answer are text; example is the whole row of the data file. The file runs when
the flag names it, and only then. It may import what lies beside it. If the function raises, or
returns no finite number, the run stops and shows the line and the sample.
"""

import functools
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from launch.lib import grade
from launch.lib.flags import line
from launch.lib.log import Stopped


def addition_reward(response: str, answer: str) -> float:
    """1.0 if the text after the last "#" is the answer, digit for digit; else 0.0."""
    _, mark, final = response.rpartition("#")
    return float(mark == "#" and final.strip() == answer)


def math_reward(response: str, answer: str) -> float:
    r"""1.0 if math-verify finds the response's final answer equal to `answer`; else 0.0.

    The final answer is the last \boxed{...} of the response, or its last number. `answer` is LaTeX,
    a number, or a solution that ends in \boxed{...} or #### 72. The comparison may take 300
    characters, 3 CPU seconds and 4 GB; beyond that the reward is 0.0.
    """
    gold = grade.gold(answer)
    found = grade.final_answer(response)
    if not found or len(found) > 300:
        return 0.0
    found = grade.plain(found)
    return float(found == gold or grade.equal(gold, found))


def auto(prompt: str, response: str, answer: str, example: dict) -> float:
    """The default rule: addition_reward for the task "addition", math_reward for other data."""
    rule = addition_reward if example.get("data") == "addition" else math_reward
    return rule(response, answer)


@functools.cache
def find(name: str) -> Callable:
    """The function that --reward names. ValueError, in one line, if there is none to call."""
    if name == "auto":
        return auto
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        raise ValueError(f"--reward {name}: must be path/to/file.py:function")
    if not Path(file).is_file():
        raise ValueError(f"--reward {name}: no such file")

    spec = importlib.util.spec_from_file_location(f"reward_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.append(str(Path(file).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--reward {name}: the file fails ({line(error)})") from None

    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"--reward {name}: no function {function} in it")
    try:
        inspect.signature(found).bind("prompt", "response", "answer", {})
    except TypeError:
        raise ValueError(f"--reward {name}: must take prompt, response, answer, example") from None
    except ValueError:  # a built-in, which has no signature to look at
        pass
    return found


def score(name: str, texts: Sequence[str], examples: Sequence[dict]) -> list[float]:
    """R of each response, which answers the example of the same index; `name` is that of --reward.

    Raises log.Stopped, which shows the sample, if the function fails on one.
    """
    function = find(name)
    rewards = []
    for text, example in zip(texts, examples, strict=True):
        sample = {"prompt": example["prompt"], "response": text, "answer": example["answer"]}
        try:
            value = function(*sample.values(), dict(example))
            if isinstance(value, str | None) or not np.isfinite(np.float32(float(value))):
                raise ValueError(f"the reward is {value!r}")
        except Exception as error:
            shown = json.dumps(sample, ensure_ascii=False, indent=2)
            why = line(error) + line_number(error, name.rpartition(":")[0])
            raise Stopped(f"--reward {name}: {why}, on\n{shown}") from error
        rewards.append(float(value))
    return rewards


def line_number(error: Exception, file: str) -> str:
    """The last line of this file that the error came through, in words, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == Path(file).resolve()]
    return f" (line {lines[-1]})" if lines else ""
