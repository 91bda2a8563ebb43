"""train.py after one act of sabotage, which argv[1] names; or, with a JSON list of [fault, *flags], after several.

Several run one after the other, a fork each, so that vLLM is imported once. Each goes on from step 1.
"""

import itertools
import json
import os
import resource
import signal
import sys
import tempfile

import train


def after_update(act) -> None:
    """act(n) runs when the n-th update of this process is done."""
    update, made = train.update, itertools.count(1)

    def sabotaged(*arguments):
        update(*arguments)
        act(next(made))

    train.update = sabotaged


def kill_self(number: int, times: int = 1):
    return lambda n: n == 2 and [os.kill(os.getpid(), number) for _ in range(times)]


def infinite_advantages() -> None:
    """In all updates but the second."""
    adv, calls = train.advantages, itertools.count(1)

    def advantages(*arguments):
        batch = adv(*arguments)
        batch.adv[:] += 1.0 if next(calls) == 2 else float("inf")
        return batch

    train.advantages = advantages
    train.checkpoint.KEEP = 9


def other_head() -> None:
    """The engine gets another head than the trainer has."""
    stream = train.moe.hf_weights

    def spoiled(*arguments):
        for name, weight in stream(*arguments):
            yield name, weight * (5 if "lm_head" in name else 1)

    train.moe.hf_weights = spoiled


def no_routes() -> None:
    engine = train.rollout.Engine
    train.rollout.Engine = lambda *z, **more: engine(*z, **(more | {"routes": False}))


def no_rewind() -> None:
    """It would read /dev/full without an end."""
    train.checkpoint.rewind = lambda *_: None


def small_files() -> None:
    """No file may grow beyond 200 kB after the first update."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    after_update(lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1)))


FAULTS = {
    "nothing": lambda: None,
    "SIGINT": lambda: after_update(kill_self(signal.SIGINT)),
    "SIGTERM": lambda: after_update(kill_self(signal.SIGTERM)),
    "SIGTERM-twice": lambda: after_update(kill_self(signal.SIGTERM, 2)),
    "rank-1-raises": lambda: after_update(lambda n: os.environ["RANK"] == "1" and 1 / 0),
    "raises": lambda: after_update(lambda n: 1 / 0),
    "infinite": infinite_advantages,
    "other-head": other_head,
    "no-routes": no_routes,
    "no-rewind": no_rewind,
    "small-files": small_files,
}


def in_a_fork(fault: str, flags: list[str]) -> tuple[int, str, str]:
    """The exit code of a run, and what it printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["train.py", *flags]
            FAULTS[fault]()
            train.main()
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name in FAULTS:
        FAULTS[name]()
        train.main()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    import vllm  # noqa: F401

    print(json.dumps([in_a_fork(fault, flags) for fault, *flags in json.loads(name)]))
