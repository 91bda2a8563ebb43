"""What breaks long runs, done to real ones: NaN, signals, a full disk, a stale engine, a dead rank.

Each fault has its message and exit code, and nothing that was there before is lost. It is done to the real command by a
line or two of sabotage. kill -9 is in tests/test_ranks.py, wrong flags and files are in tests/test_mistakes.py.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ONE, TWO, WORKERS, launch, rows
from safetensors.torch import load_file

from launch.lib import checkpoint, grade, log, reward

FAULTS = str(WORKERS / "faults.py")


def sabotage(run, name: str, fault: str, *more: str, like: str | None = "begun", steps: int = 5):
    """A run that goes on from the finished step after a fault of faults.py -> its folder, and how it ended."""
    flags, folder = run
    if like and not (folder / name).exists():
        shutil.copytree(folder / like, folder / name)
    command = [*ONE, FAULTS, fault, *flags, "--steps", str(steps), *more]
    return folder / name, launch([*command, "--out", str(folder / name)], ok=False)


# name -> (fault, more flags): runs that share one process, each of which goes on from a copy of the finished step.
SHARED = {
    "SIGINT": ("SIGINT", "--save-every 100"),
    "SIGTERM": ("SIGTERM", "--save-every 100"),
    "infinite": ("infinite", "--steps 9"),
    "stale": ("other-head", ""),
    "no-routes": ("no-routes", ""),
    "secret": ("raises", ""),
}
SECRET = "hf_secret_of_a_user"


@pytest.fixture(scope="module")
def ended(run):
    """Name -> the folder of a run of SHARED, its exit code, stdout and stderr."""
    flags, folder = run
    jobs = []
    for name, (fault, more) in SHARED.items():
        shutil.copytree(folder / "begun", folder / name)
        jobs.append([fault, *flags, "--steps", "5", *more.split(), "--out", str(folder / name)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        done = launch([*ONE, FAULTS, json.dumps(jobs)])
    results = json.loads(done.stdout.splitlines()[-1])
    return {name: (folder / name, *ends) for name, ends in zip(SHARED, results, strict=True)}


def whole(out: Path) -> list[int]:
    """The steps of metrics.jsonl, each line of which is whole; and what the checkpoints say is there and readable."""
    from moe import MoEConfig, meta_parameters

    config = MoEConfig.from_pretrained(json.loads((out / "config.json").read_text())["model"])
    shapes = {name: p.shape for name, p in meta_parameters(config).items()}
    assert checkpoint.open_folder(out, "auto", shapes) == checkpoint.saved(out)[-1]
    return [row["step"] for row in rows(out)]


def test_a_signal_to_all_ranks_is_one_signal(run):
    """SIGTERM twice to both of two ranks, as a scheduler and torchrun send it: the same step is finished and saved on both, and each ends
    with 143. Catches codes that add up over ranks, and a rank that goes on alone and waits for the other for ever.
    """
    flags, folder = run
    shutil.copytree(folder / "begun", folder / "both")
    more = ["--steps", "9", "--save-every", "100", "--out", str(folder / "both")]
    done = launch([*TWO, FAULTS, "SIGTERM-twice", *flags, *more], ok=False)
    assert re.findall(r"exitcode +: (\d+)", done.stderr) == ["143"] * 2, done.stderr[-3000:]
    assert whole(folder / "both") == [0, 1, 2]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_step_and_saves(ended, name, code):
    """Ctrl-C or SIGTERM in a step: the step is finished, logged and saved, and the exit code is 128 + the signal's.
    Catches a step that is lost, and a run that reports success.
    """
    out, ended_with, _, errors = ended[name]
    assert ended_with == code, errors[-2000:]
    assert f"{name}: saving after this step" in errors
    assert f"--resume auto goes on from {out}/checkpoints/step-3" in errors
    assert whole(out) == [0, 1, 2] and not (out / "hf.part").exists()


def test_what_is_not_finite_is_left_out_and_counted(ended):
    """An infinite advantage in updates 1, 3, 4 and 5: update 1 is skipped and the run goes on; after three in a
    row it stops with code 1 and names the last checkpoint, whose weights are finite and those before the bad updates.
    """
    out, code, printed, errors = ended["infinite"]
    assert code == 1, errors[-2000:]
    assert [row["skipped_updates"] for row in rows(out)] == [0, 1, 0, 1, 1, 1]
    assert "left out 1 updates: loss not finite" in printed
    assert [row["lr"] for row in rows(out)] == [1e-4, None, 1e-4, None, None, None]
    says = "3 steps in a row with a loss or gradient that is not finite"
    assert says in errors.splitlines()[-2]
    assert f"--resume auto goes on from {out}/checkpoints/step-5" in errors
    assert whole(out) == list(range(6))

    def weights(step):
        files = sorted((out / "checkpoints" / f"step-{step}").glob("*.safetensors"))
        return {k: v for file in files for k, v in load_file(file).items()}

    states = {step: weights(step) for step in (1, 2, 3, 5)}
    for name, before in states[1].items():
        assert before.equal(states[2][name]) and states[3][name].equal(states[5][name])
    assert not states[2]["weight.norm.weight"].equal(states[3]["weight.norm.weight"])


def test_an_engine_with_other_weights_stops_the_run(ended):
    """A sync that puts a wrong head into vLLM: step 1 stops with code 1, KL and likely causes, before a checkpoint of
    what it did to the weights. Catches stale weights in a run whose log looks fine.
    """
    out, code, _, errors = ended["stale"]
    assert code == 1, errors[-2000:]
    line = next(line for line in errors.splitlines() if "stopped" in line)
    assert "step 1: KL[mu||pi_old] is" in line and "does not sample from the weights" in line
    assert [p.name for p in checkpoint.saved(out)] == ["step-1"]


def test_lost_routes_name_the_setting(ended):
    """An engine that returns no routes: code 1, the setting's name, nothing trained on."""
    out, code, _, errors = ended["no-routes"]
    assert code == 1, errors[-2000:]
    assert "stopped: no response can be trained on: " in errors
    assert "enable_return_routed_experts" in errors
    assert whole(out) == [0]


def test_a_full_disk_names_the_path_and_keeps_what_is_there(run):
    """No room for samples.jsonl (/dev/full), and none for a checkpoint (a limit on file sizes): code 1 and one line with
    the path; the older checkpoint still loads, and the run goes on from it when there is room again.
    """
    out, folder = run[1] / "full", run[1]
    shutil.copytree(folder / "begun", out)
    (out / "samples.jsonl").unlink()
    (out / "samples.jsonl").symlink_to("/dev/full")
    out, done = sabotage(run, "full", "no-rewind")
    assert done.returncode == 1, done.stderr[-2000:]
    assert f"stopped: {out}/samples.jsonl: cannot be written ([Errno 28] No space" in done.stderr
    (out / "samples.jsonl").unlink()
    assert whole(out)[0] == 0

    out, done = sabotage(run, "full", "small-files")
    assert done.returncode == 1, done.stderr[-2000:]
    assert f"stopped: {out}/checkpoints/step-2.part: cannot be written (" in done.stderr
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in checkpoint.saved(out)] == ["step-1"]
    out, done = sabotage(run, "full", "nothing", steps=2)
    assert done.returncode == 0 and whole(out) == [0, 1], done.stderr[-2000:]


def test_a_rank_that_dies_ends_the_others(run):
    """Rank 1 of two raises in an update: within a minute torchrun ends with code 1 and no process stays; its error is
    the first one shown. Catches a rank that waits in a collective for hours.
    """
    flags, folder = run
    begin = time.monotonic()
    shutil.copytree(folder / "begun", folder / "dies")
    out = str(folder / "dies")
    done = launch([*TWO, FAULTS, "rank-1-raises", *flags, "--out", out], ok=False)
    assert time.monotonic() - begin < 60 + 60  # of which the start takes some
    assert done.returncode == 1 and whole(folder / "dies") == [0]
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    assert "ZeroDivisionError: division by zero" in errors[0], errors
    found = subprocess.run(["pgrep", "-f", out], check=False, stdout=subprocess.PIPE)
    assert not found.stdout


def test_equal_rewards_do_no_harm_and_a_busy_port_no_matter(run):
    """Answers that nobody gives: every advantage is 0, and the export is the model it started from, bit for bit. The
    port that distributed programs like best is taken meanwhile.
    """
    flags, folder = run
    (folder / "never.jsonl").write_text('{"prompt": "a", "answer": "nobody says this"}\n' * 4)
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("", 29500))
        busy.listen()
        more = ["--data", str(folder / "never.jsonl")]
        out, done = sabotage(run, "equal", "nothing", *more, like=None, steps=1)
    assert done.returncode == 0, done.stderr[-2000:]
    row = rows(out)[0]
    assert row["zero_adv_group_frac"] == 1 and row["grad_norm"] == 0 and row["loss"] == 0
    start = load_file(Path(flags[flags.index("--model") + 1]) / "model.safetensors")
    after = {}
    for file in (out / "hf").glob("*.safetensors"):
        after |= load_file(file)
    assert all(start[name].equal(after[name]) for name in start)


def test_rows_that_are_not_finite_are_bad_steps_and_a_jump_is_not():
    """KL NaN in a skipped step counts as a bad step, not as a stale engine; KL 0.5 stops a run at 1e-4, not one at 0.1;
    above 1 it always stops. Catches a check that NaN or a low level switches off.
    """
    row = {"step": 0, "kl_rollout_train_k3": 1e-4, "skipped_updates": 0}
    watch = log.Watch()
    watch.check(row)
    for _ in range(2):
        watch.check(row | {"kl_rollout_train_k3": float("nan"), "skipped_updates": 1})
    with pytest.raises(log.Stopped, match="3 steps in a row"):
        watch.check(row | {"kl_rollout_train_k3": float("nan"), "skipped_updates": 1})
    for level, kl, stops in ((1e-4, 0.19, 0), (1e-4, 0.5, 1), (0.1, 0.5, 0), (0.1, 1.1, 1)):
        watch = log.Watch()
        watch.check(row | {"kl_rollout_train_k3": level})
        if stops:
            with pytest.raises(log.Stopped, match="its median was"):
                watch.check(row | {"kl_rollout_train_k3": kl})
        else:
            watch.check(row | {"kl_rollout_train_k3": kl})
    with pytest.raises(log.Stopped, match="in the first step"):
        log.Watch().check(row | {"kl_rollout_train_k3": 1.5})


def test_a_signal_to_the_group_spares_the_grader():
    """Ctrl-C goes to every process of the terminal's group: the grader is not in it, answers afterwards, and is replaced
    when it was killed. Catches a right answer that scores 0, and a step that is lost to a broken pipe.
    """
    assert reward.math_reward(r"\boxed{6/2}", "3") == 1.0
    assert os.getpgid(grade.grader().pid) != os.getpgid(0)
    grade.grader().kill()
    grade.grader().wait()
    assert reward.math_reward(r"\boxed{6/2}", "3") == 1.0


def test_finished_is_the_newest_checkpoint_exported(tmp_path):
    """A run is finished when its export is younger than its newest checkpoint, which has the last step."""
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    older, newest = checkpoint.saved(tmp_path)
    assert not checkpoint.finished(tmp_path, newest, 2)
    (tmp_path / "hf").mkdir()
    for path, when in ((older, 1), (newest, 2), (tmp_path / "hf", 3)):
        os.utime(path, (when, when))
    assert checkpoint.finished(tmp_path, newest, 2)
    assert not checkpoint.finished(tmp_path, newest, 3)
    assert not checkpoint.finished(tmp_path, older, 1)
    os.utime(tmp_path / "hf", (1, 1))  # of an earlier end
    assert not checkpoint.finished(tmp_path, newest, 2)


def test_nothing_printed_holds_the_environment(ended):
    """A secret in the environment is in no file of a run and in no message of one that fails."""
    out, code, printed, errors = ended["secret"]
    assert code == 1 and "ZeroDivisionError" in errors
    texts = [p.read_bytes() for p in out.rglob("*") if p.is_file()]
    assert SECRET.encode() not in b"".join([*texts, errors.encode(), printed.encode()])
