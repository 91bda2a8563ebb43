"""What a model scores: k responses to each problem of --eval-data, graded; nothing is trained.

    python launch/evaluate.py --model runs/mine/hf --eval-data aime25.jsonl --eval-samples 32 \\
        --max-new-tokens 2048 --out runs/mine-eval
    python launch/evaluate.py --model MODEL --resume runs/mine/checkpoints/step-50 --eval-data ...

Hardware: as train.py's, without the memory for training when it takes a model folder. It takes
train.py's flags as they are; of those, what a run's own evaluation used gives that evaluation
again, number for number. --resume names a checkpoint of a run from --model. Adds a row to
OUT/eval.jsonl, a row a problem to OUT/eval_problems.jsonl, and prints a line. Also under torchrun.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from launch.lib import checkpoint, data, flags


def prepare(c: train.Config) -> tuple[train.moe.MoEConfig, list[dict]]:
    """The model's numbers and the problems. ValueError names a wrong flag or file."""
    if not c.eval_data:
        raise ValueError("--eval-data: names the problems")
    c.data = ""  # there is nothing to train on
    config = train.open_model(c)
    _, problems = data.prepare(c, config.max_position_embeddings)
    if c.resume:
        shapes = {name: p.shape for name, p in train.moe.meta_parameters(config).items()}
        checkpoint.check(Path(c.resume), shapes)
    try:
        Path(c.out).mkdir(parents=True, exist_ok=True)
        (Path(c.out) / "eval.jsonl").touch()
    except OSError as error:
        raise ValueError(f"--out {c.out}: cannot be written ({error.strerror})") from None
    return config, problems


def run(c: train.Config, acc, config: train.moe.MoEConfig, problems: list[dict]) -> None:
    """Samples and writes. Trains nothing, and changes no file but the two."""
    engine = train.make_engine(c, config, acc, problems, load=not c.resume)
    model, step = None, 0
    if c.resume or engine.stale:  # emulated dtypes round what a sync sends
        model, optimizer = train.make_model(c, config, acc)
        if c.resume:
            step = checkpoint.load(model, optimizer, Path(c.resume))
    train.evaluate(engine, model, problems, step, c, acc, train.Layout.of(c, acc))
    engine.close()


def main() -> None:
    try:
        c = train.Config.from_flags()
        config, problems = prepare(c)
    except ValueError as error:
        flags.fail(error)
    acc = train.start(c)
    run(c, acc, config, problems)
    acc.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends


if __name__ == "__main__":
    main()
