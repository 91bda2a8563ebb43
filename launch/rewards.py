"""R(x, y) for train.py: the task's own rule, or yours.

    --reward path/to/file.py:function        def function(prompt, response, answer, example) -> float

prompt, response and answer are text, example the whole row of the data file. The file runs when it is named, and only
then; it may import what lies beside it. A built-in rule never fails; what yours raises, or a reward that is no finite
number, stops the run and shows line and sample, or with --reward-errors zero counts as 0 and is counted.
"""

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from launch import guard
from launch.flags import line
from rollout import Rollout, addition_reward, reward


def auto(prompt: str, response: str, answer: str, example: dict) -> float:
    """The task's own rule: digit for digit for addition, math-verify for everything else."""
    return (addition_reward if example.get("data") == "addition" else reward)(response, answer)


@cache
def find(name: str) -> Callable:
    """The function behind --reward; ValueError, in one line, where there is none that takes four arguments."""
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


def place(error: Exception, file: str) -> str:
    """The last line of this file that the error came through, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == Path(file).resolve()]
    return f" (line {lines[-1]})" if lines else ""


def score(batch: Rollout, examples: list[dict], c) -> Rollout:
    """The batch with its rewards (B,) float32, and where the function failed (B,) bool. Group ids index `examples`.
    guard.Stopped, with the sample, for a failure that --reward-errors does not forgive."""
    function = find(c.reward)
    rewards, failed = np.zeros(len(batch), np.float32), np.zeros(len(batch), bool)
    for b, (response, group) in enumerate(zip(batch.texts, batch.group_ids, strict=True)):
        example = examples[group]
        sample = {"prompt": example["prompt"], "response": response, "answer": example["answer"]}
        try:
            value = function(*sample.values(), dict(example))
            if isinstance(value, str | None) or not np.isfinite(np.float32(float(value))):
                raise ValueError(f"the reward is {value!r}")
            rewards[b] = value
        except Exception as error:
            if c.reward_errors == "stop":
                shown = json.dumps(sample, ensure_ascii=False, indent=2)
                why = f"{line(error)}{place(error, c.reward.rpartition(':')[0])}"
                raise guard.Stopped(f"--reward {c.reward}: {why}, on\n{shown}") from error
            failed[b] = True
    return replace(batch, rewards=rewards, failed=failed)
