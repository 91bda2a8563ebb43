"""One process, two ranks, a run in pieces: the same numbers. Real torchrun, gloo, FSDP2, vLLM and kill -9, in fp32."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ONE, TWO, WORKERS, close, exported, launch, launch_many, rows, untimed
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def lottery(tmp_path_factory, tiny, lottery_file):
    """Flags of a small run on the lottery, and a folder for its output."""
    folder = tmp_path_factory.mktemp("ranks")
    flags = "--prompts-per-step 8 --group-size 4 --max-new-tokens 24 --precision fp32 --lr 1e-4"
    flags += " --micro-batch-tokens 100"
    return [*flags.split(), "--model", str(tiny()), "--data", str(lottery_file)], folder


def test_two_ranks_make_the_same_update(lottery):
    """On the same rollout of unequal lengths: losses, gradient norms and updated weights of 1 and 2 ranks, within 1e-5;
    N = 1 and 4, each replay mode, with and without recomputed layers; N = 8, where one rank has nothing to train in every
    mini-batch; and 3 prompts on 2 ranks. Catches gradients averaged over ranks, one rank's numbers, FSDP off.
    """
    flags, folder = lottery
    for name, python in (("one", ONE), ("two", TWO)):
        (folder / name).mkdir()
        launch([*python, str(WORKERS / "updates.py"), json.dumps(flags), str(folder / name)])
    one, two = (json.loads((folder / n / "results.json").read_text()) for n in ("one", "two"))
    assert one[1] == two[1], "other rollouts"
    assert len({len(tokens) for tokens in one[1]}) > 5
    start = load_file(Path(flags[flags.index("--model") + 1]) / "model.safetensors")
    for name, single in one[0].items():
        double = two[0][name]
        for a, b in zip(single["norm"], double["norm"], strict=True):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-9), name
        for (loss, _), *parts in zip(*single["ranks"], *double["ranks"], strict=True):
            assert loss == pytest.approx(sum(part for part, _ in parts), abs=1e-5), name
            assert not name.startswith("8-8") or sorted(some for _, some in parts) == [False, True]
        a, b = (load_file(folder / n / f"{name}.safetensors") for n in ("one", "two"))
        assert max((a[k] - b[k]).abs().max() for k in a) < 1e-5, name
        moved = {k for k in a if (a[k] - start[k]).abs().max() > 5e-5}  # about lr, by Adam
        assert len(moved) > 0.9 * len(a), (name, set(a) - moved)
    assert torch.tensor(one[0]["8-4-none-0"]["norm"]).gt(0).sum() >= 3


def test_four_ranks_in_two_engines_and_two_copies_make_the_same_steps(lottery):
    """--rollout-tp 2 --hsdp-replicas 2 on 4 ranks: each engine spans two ranks, each of which trains on half of its
    rollout, and each half of the ranks holds a whole copy: the metrics of one process over two steps within 1e-4 (the
    engine's sums are split in two), with moments that live on the host. Catches a rank that trains on the other's half
    or counts it twice, a sync of its own shard alone, and copies whose gradients are not summed.
    """
    flags, folder = lottery
    more = ["--steps", "2", "--minibatches", "2", "--replay", "R3"]
    launch([*ONE, "train.py", *flags, *more, "--out", str(folder / "plain")])
    more += ["--rollout-tp", "2", "--hsdp-replicas", "2", "--offload-optimizer"]
    four = [*TWO[:-1], "4"]
    done = launch([*four, "train.py", *flags, *more, "--out", str(folder / "four")])
    assert "fsdp2 on 4 cpu ranks in 2 copies, fp32 compute" in done.stdout, done.stdout
    for a, b in zip(rows(folder / "plain"), rows(folder / "four"), strict=True):
        close(a, b, 1e-4)


def test_a_killed_run_repeats_the_uninterrupted_one(lottery):
    """kill -9 in the second mini-batch of a step (one process) and while a checkpoint is written (one of two ranks),
    then --resume auto: the metrics and the export of the undisturbed run, bit for bit on the same number of ranks;
    within 1e-5 when the killed run goes on with 2 ranks in place of 1 or 1 in place of 2. Catches moments, data
    position or seeds that are lost, a checkpoint that is loaded half-written, rows of steps that are run again.
    """
    flags, folder = lottery
    more = "--steps 4 --minibatches 2 --replay R3 --save-every 1 --resume auto"
    flags = [*flags, *more.split()]
    kill = WORKERS / "kill.py"

    def killed(python, name, where, left):
        """A run that kill -9 ends at its 3rd update or save, and the checkpoints that it leaves."""
        out = folder / name
        done = launch([*python, str(kill), where, "3", "0", *flags, "--out", str(out)], ok=False)
        assert done.returncode == -9 or "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-4000:]
        assert sorted(p.name for p in (out / "checkpoints").iterdir()) == left
        return [row["step"] for row in rows(out)]

    assert killed(ONE, "one", "update", ["step-1"]) == [0]
    assert killed(TWO, "two", "save", ["step-1", "step-2", "step-3.part"]) == [0, 1, 2]
    shutil.copytree(folder / "one", folder / "one-to-two")
    shutil.copytree(folder / "two", folder / "two-to-one")
    for python, names in (
        (ONE, ("whole-one", "one", "two-to-one")),
        (TWO, ("whole-two", "two", "one-to-two")),
    ):
        launch_many([[*flags, "--out", str(folder / name)] for name in names], python)

    for name, moved in (("one", "one-to-two"), ("two", "two-to-one")):
        whole, resumed = rows(folder / f"whole-{name}"), rows(folder / name)
        assert [untimed(row) for row in resumed] == [untimed(row) for row in whole]
        assert exported(folder / name) == exported(folder / f"whole-{name}"), "another export"
        assert max(row["logp_diff_max"] for row in resumed) < 1e-5  # synced before it sampled
        for a, b in zip(whole, rows(folder / moved), strict=True):
            close(a, b, 1e-5)
    assert len(list((folder / "two-to-one" / "checkpoints").iterdir())) == 2  # KEEP, and no .part
    found = subprocess.run(["pgrep", "-f", str(kill)], check=False, stdout=subprocess.PIPE)
    assert not found.stdout
