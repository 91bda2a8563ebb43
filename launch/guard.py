"""How a run notices that it fools itself, and what becomes of faults (imported by train.py and report.py)."""

import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException


class Stopped(RuntimeError):
    """A run that cannot go on, for the reason in its text: one line and exit code 1; what was saved stays."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong while `path` is written (a full disk, say) into Stopped, which names it."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        failures = getattr(error, "failures", {})  # rank -> (exception, where)
        why = "; ".join({str(failure[0]) for failure in failures.values()}) or str(error)
        raise Stopped(f"{path}: cannot be written ({why})") from error


class Signals:
    """Lets a step end after SIGTERM or Ctrl-C; a second Ctrl-C ends the process at once, but for the copy of the first
    that torchrun sends."""

    def __init__(self):
        self.got, self.when = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame) -> None:
        if self.got and number == signal.SIGINT and time.monotonic() > self.when + 2:
            os._exit(128 + number)
        if not self.got:
            self.got, self.when = number, time.monotonic()
            os.write(2, f"\n{signal.Signals(number).name}: saving after this step\n".encode())

    def asked(self) -> int:
        """The signal's number on every rank as soon as one rank has got it, else 0. A collective."""
        return max(gather_object([self.got]))


class Watch:
    """Looks at each step's metrics, before a checkpoint is written: Stopped for a run that is beyond repair.

    A stale or half-loaded engine samples from other weights than those that are trained: log-probs nats apart, so that
    KL[mu || pi_old] (k3) is above 1 nat a token, or above 0.2 and 20 times what it was. (In the recorded runs of
    launch/figures.py, with 4-bit rollout weights, the largest mean of 8 updates is 0.16. One that had collapsed was
    stopped here, at 0.4.)
    """

    ALWAYS, FLOOR, RISE = 1.0, 0.2, 20

    def __init__(self, max_bad_steps: int):
        self.max_bad_steps, self.bad, self.levels = max_bad_steps, 0, deque(maxlen=20)

    def check(self, m: dict) -> None:
        """m: a step's row of metrics.jsonl, the same on every rank."""
        kl, level = m["kl_rollout_train_k3"], statistics.median(self.levels or [math.inf])
        if kl > self.ALWAYS or kl > max(self.FLOOR, self.RISE * level):
            before = f"its median was {level:.1g}" if self.levels else "in the first step"
            raise Stopped(
                f"step {m['step']}: KL[mu||pi_old] is {kl:.2g} nats a token, {before}: vLLM does not sample from the "
                "weights that are trained. Likely: a sync that loaded part of them or none (another vLLM version?), "
                "log-probs of other sampling settings, a model folder that changed during the run; with fp8 or int4 "
                "rollouts, a policy that has collapsed (its reward tells)"
            )
        if math.isfinite(kl):  # else the update was skipped
            self.levels.append(kl)
        self.bad = self.bad + 1 if m["skipped_updates"] else 0
        if self.bad >= self.max_bad_steps:
            raise Stopped(
                f"step {m['step']}: {self.bad} steps in a row with a loss or gradient that is not finite "
                "(--max-bad-steps); their updates were left out"
            )
