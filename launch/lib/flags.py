"""Command-line flags from a dataclass, and the values and combinations that make no sense."""

import argparse
import dataclasses
import importlib.util
import inspect
import math
import os
import re
import sys
from pathlib import Path
from typing import get_args

import torch

# The least value of a number where it is not 1 (int) or "anything above 0" (float).
LEAST = {"group_size": 2, "seed": 0, "eval_every": 0, "save_every": 0, "eval_temperature": 0}

# The switches of minirl_loss. GRPO and CISPO do not have them.
ABLATIONS = ("clip", "is_correction", "length_norm")


def flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def line(error: BaseException) -> str:
    """The error as one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def fail(message: object) -> None:
    """Ends the program for a user's mistake: one line, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse(cls: type, argv: list[str] | None, description: str):
    """An instance of the dataclass, from flags with the names of its fields.

    The comment behind a field is its help text. A comment on a line of its own is a heading.
    A bool becomes two flags, such as --clip and --no-clip.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.error = fail
    group = parser
    fields = {field.name: field for field in dataclasses.fields(cls)}
    lines = re.findall(r"^    (?:# (.+)|(\w+): .*  # (.+))$", inspect.getsource(cls), re.M)

    for heading, name, text in lines:
        if heading:
            group = parser.add_argument_group(heading)
            continue
        field = fields[name]
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif get_args(field.type):
            kind = {"choices": get_args(field.type)}
        else:
            kind = {"type": field.type}
        text = f"{text} (default: {field.default})".replace("%", "%%")
        group.add_argument(flag(name), default=field.default, help=text, **kind)
    return cls(**vars(parser.parse_args(argv)))


def check(c, ranks: int, node: int) -> None:
    """Checks train.Config for a run on `ranks` ranks, `node` of them on each machine.

    Raises ValueError, which names the flag.
    """
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        least = LEAST.get(field.name, 1)
        if field.type is int and value < least:
            raise ValueError(f"{flag(field.name)} {value}: must be at least {least}")
        if field.type is float and not (value > 0 or value == least == 0):
            raise ValueError(f"{flag(field.name)} {value}: must be positive")

    def insist(holds: object, name: str, message: str) -> None:
        if not holds:
            raise ValueError(f"{flag(name)} {getattr(c, name)}: {message}")

    # Model and data, sampling.
    template = c.prompt_template
    insist(not template or "{prompt}" in template, "prompt_template", "must hold {prompt}")
    for name in ("temperature", "eval_temperature"):
        value = getattr(c, name)
        insist(value < math.inf, name, "must be finite")
        insist(not 0 < value < 0.01, name, "is below 0.01, the least that vLLM samples at")

    # Objective, optimization.
    P = c.prompts_per_step
    insist(P % c.minibatches == 0, "minibatches", f"does not divide --prompts-per-step {P}")
    same = c.replay == "R2" and c.minibatches == 1
    insist(not same, "replay", "is none with --minibatches 1, where pi_old's experts are pi's own")
    insist(c.eps_low <= 1, "eps_low", "must be at most 1")
    insist(c.lr < 1, "lr", "must be below 1")
    for name in ABLATIONS:
        default = getattr(c, name) == getattr(type(c), name)
        insist(default or c.objective == "minirl", name, f"is nothing that {c.objective} knows")

    # Machine.
    insist(c.rollout_memory < 1, "rollout_memory", "must be below 1")
    insist(ranks % c.rollout_tp == 0, "rollout_tp", f"must divide the {ranks} ranks")
    insist(node % c.rollout_tp == 0, "rollout_tp", f"must divide the {node} ranks of a machine")
    engines = ranks // c.rollout_tp
    insist(engines <= P, "prompts_per_step", f"fewer than {engines} engines")
    copies = [n for n in range(1, max(ranks, 2)) if ranks % n == 0]  # at least two ranks a copy
    insist(c.hsdp_replicas in copies, "hsdp_replicas", f"{ranks} ranks allow {copies}")
    if c.rollout_dtype == "fp8" and torch.cuda.is_available():
        able = torch.cuda.get_device_capability() >= (8, 9)
        insist(able, "rollout_dtype", "needs a GPU of compute capability 8.9 or above")
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "")
    allocator += os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    shared = c.rollout_tp > 1 and "expandable_segments:true" in allocator.lower()
    why = "not with PYTORCH_ALLOC_CONF=expandable_segments:True, where no rank reaches another's "
    why += "CUDA graphs; train.py sets it once the engines stand"
    insist(not shared, "rollout_tp", why)

    # Evaluation, record.
    insist(not c.eval_every or c.eval_data, "eval_every", "needs --eval-data")
    engineless = not (c.eval_data or c.save_rollouts)
    insist(
        not c.load_rollouts or engineless, "load_rollouts", "without --eval-data, --save-rollouts"
    )
    known = c.log_with == "none" or importlib.util.find_spec(c.log_with)
    insist(known, "log_with", "is not installed")


def check_model(c, config) -> None:
    """Checks train.Config against the numbers of its model (moe.MoEConfig). Raises ValueError."""
    heads = config.num_attention_heads
    if c.replay != "none" and not config.has_experts:
        raise ValueError(f"--replay {c.replay}: {c.model} is dense, it has no experts to replay")
    if heads % c.rollout_tp:
        raise ValueError(f"--rollout-tp {c.rollout_tp}: {c.model} has {heads} attention heads")
