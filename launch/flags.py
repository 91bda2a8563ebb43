"""Command-line flags out of a dataclass, and which values and combinations make no sense (imported by train.py)."""

import argparse
import dataclasses
import importlib.util
import inspect
import math
import os
import re
import sys
from typing import get_args

import torch

import loss

# The least value of a number, where it is not 1, or for a float anything above 0.
LEAST = {"group_size": 2} | dict.fromkeys(("seed", "eval_every", "save_every"), 0)
LEAST |= dict.fromkeys(("eval_temperature", "eval_max_new_tokens"), 0)


def flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def line(error: BaseException) -> str:
    """An error as one line, at most 200 characters of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def fail(message: object) -> None:
    """A user's mistake: one line, exit code 2."""
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse(cls: type, argv: list[str] | None, description: str):
    """An instance of the dataclass from flags named as its fields: --prompts-per-step 8, --clip / --no-clip.

    The comment behind a field is its --help.
    """
    parser = argparse.ArgumentParser("train.py", description=description, allow_abbrev=False)
    parser.error = fail
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
    for f in dataclasses.fields(cls):
        kind = {"choices": get_args(f.type)} if get_args(f.type) else {"type": f.type}
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else kind
        text = f"{comments[f.name]} (default: {f.default})".replace("%", "%%")
        parser.add_argument(flag(f.name), default=f.default, help=text, **kind)
    return cls(**vars(parser.parse_args(argv)))


def check(c, ranks: int, node: int) -> None:
    """ValueError, naming the flag, for values and combinations of train.Config that make no sense on so many ranks,
    `node` of them on each machine."""
    for f in dataclasses.fields(c):
        value, least = getattr(c, f.name), LEAST.get(f.name, 1)
        if f.type is int and value < least:
            raise ValueError(f"{flag(f.name)} {value}: must be at least {least}")
        if f.type is float and not (value > 0 or value == LEAST.get(f.name)):
            raise ValueError(f"{flag(f.name)} {value}: must be positive")

    def insist(fine: object, name: str, message: str) -> None:
        if not fine:
            raise ValueError(f"{flag(name)} {getattr(c, name)}: {message}")

    P, engines = c.prompts_per_step, ranks // c.rollout_tp
    copies = [n for n in range(1, max(ranks, 2)) if ranks % n == 0]  # at least two ranks a copy
    insist(P % c.minibatches == 0, "minibatches", f"does not divide --prompts-per-step {P}")
    insist(ranks % c.rollout_tp == 0, "rollout_tp", f"must divide the {ranks} ranks")
    insist(node % c.rollout_tp == 0, "rollout_tp", f"must divide the {node} ranks of a machine")
    if c.rollout_dtype == "fp8" and torch.cuda.is_available():
        able = torch.cuda.get_device_capability() >= (8, 9)
        insist(able, "rollout_dtype", "needs a GPU of compute capability 8.9 or above")
    memory = "".join(os.environ.get(f"PYTORCH_{on}ALLOC_CONF", "") for on in ("", "CUDA_"))
    shared = c.rollout_tp > 1 and "expandable_segments:true" in memory.lower()
    why = "not with PYTORCH_ALLOC_CONF=expandable_segments:True, where no rank reaches another's CUDA graphs"
    insist(not shared, "rollout_tp", f"{why}; train.py sets it once the engines stand")
    idle = c.replay == "R2" and c.minibatches == 1
    insist(not idle, "replay", "is none with --minibatches 1, where pi_old's experts are pi's own")
    insist(c.hsdp_replicas in copies, "hsdp_replicas", f"{ranks} ranks allow {copies}")
    insist(engines <= P, "prompts_per_step", f"fewer than {engines} engines")
    for name in ("lr", "rollout_memory"):
        insist(getattr(c, name) < 1, name, "must be below 1")
    for name in ("temperature", "eval_temperature"):
        insist(getattr(c, name) < math.inf, name, "must be finite")
        low = 0 < getattr(c, name) < 0.01
        insist(not low, name, "is below 0.01, the least that vLLM samples at")
    insist(c.eval_top_p <= 1, "eval_top_p", "must be at most 1")
    insist(c.eps_low <= 1, "eps_low", "must be at most 1")
    insist(not c.eval_every or c.eval_data, "eval_every", "needs --eval-data")
    insist(not c.eval_only or c.eval_data, "eval_only", "needs --eval-data")
    template = c.prompt_template
    insist(not template or "{prompt}" in template, "prompt_template", "must hold {prompt}")
    alone = not (c.eval_data or c.save_rollouts)  # there is no engine
    insist(not c.load_rollouts or alone, "load_rollouts", "without --eval-data, --save-rollouts")
    known = c.log_with == "none" or importlib.util.find_spec(c.log_with)
    insist(known, "log_with", "is not installed")
    takes = inspect.signature(loss.OBJECTIVES[c.objective][0]).parameters
    for name in ("clip", "is_correction", "length_norm"):
        fine = name in takes or getattr(c, name) == getattr(type(c), name)
        insist(fine, name, f"is nothing that {c.objective} knows")
