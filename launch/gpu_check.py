"""What only a GPU can show, in four stages; each stands alone, in a process of its own, with its log and a limit.

    bash launch/gpu_check.sh                                    # installs, then all four
    python launch/gpu_check.py kernels training                 # these; no vLLM needed
    python launch/gpu_check.py --size small                     # the same code on CPUs, at toy size (tests/test_gpu_check.py)

    kernels    needs torch: moe.py's model with one layer, at the 30B's shapes and the toy's, forward and backward, live
               and replayed, checkpointed and not, against float64 on the CPU; tokens/s and the share of a bf16 GEMM
    training   needs torch, accelerate: train.py's own update with FSDP2 and AdamW, with and without --offload-optimizer,
               on a batch that an engine sampled on a CPU (launch/results/gpu_check); gradient and weights against fp32
               on the CPU
    parity     needs vLLM: log mu against log pi_old in bf16 and fp8 over three cycles of sleep and wake, by vLLM's
               default runner and by the one that CPUs have; which kernels it chose
    loop       needs vLLM: train.py on the toy, and on as many layers of Qwen3-30B-A3B (random weights) as plan.py says fit

Hardware: one GPU of 80 GB or more, 64 GB of host memory, 20 GB of disk. Expect a table and "ok" behind each part, exit
code 1 if one fails; logs in runs/gpu-check/. A part's limit begins with it, after a first part that only warms caches.
Not yet run on a GPU; on 2 CPU cores, --size small: about 2 minutes.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import moe
from launch import cold_start

ROOT = Path(__file__).resolve().parents[1]
RECORDED = (
    ROOT / "launch" / "results" / "gpu_check"
)  # a batch of the model that `start_model` makes
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
KERNELS = re.compile(r"(Using|Selected|Enabled).*(backend|kernel|attention|MoE|Runner|graph)", re.I)


@dataclass(frozen=True)
class Size:
    """How much work: layers and tokens of `kernels`; prompts, tokens and steps of the rest."""

    shapes: tuple[str, ...] = ("toy", "30b")
    checked: tuple[int, ...] = (96, 1, 159)  # lengths of what is compared
    timed: int = 16384  # tokens of what is timed
    gemm: int = 8192
    prompts: int = 64
    steps: int = 3
    new: int = 512  # tokens of a response of the random layers
    layers: tuple[int, ...] = (6, 5, 4, 3, 2, 1)


SIZES = {"full": Size(), "small": Size(("toy",), (20, 1, 11), 256, 256, 4, 2, 16, (1,))}


def result(part: str, good: bool, **numbers) -> None:
    """A row of the table; the process ends with code 1 where it is not good."""
    print("RESULT", json.dumps({"part": part, "ok": bool(good)} | numbers), flush=True)
    if not good:
        result.failed = True


result.failed = False


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, of all elements."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def seconds(f, repeats: int = 5) -> float:
    """The least of some calls, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        f()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


# --- kernels


def one_layer(shape: str) -> moe.MoEConfig:
    from launch.plan import PUBLISHED

    published = PUBLISHED | {"num_hidden_layers": 1, "vocab_size": 1024}
    return moe.MoEConfig.from_dict(published | (cold_start.CONFIG if shape == "toy" else {}))


def kernels(size: Size) -> None:
    """bf16 below 2e-2 of float64 on the CPU, in hidden states and in every gradient; tokens/s."""
    a = torch.randn(size.gemm, size.gemm, device=DEVICE, dtype=torch.bfloat16)
    gemm = 2 * size.gemm**3 / seconds(lambda: a @ a)
    for shape in size.shapes:
        config = replace(one_layer(shape), num_hidden_layers=1)
        exact = cold_start.init_weights(moe.MoETransformer(config), 0, 0.05).bfloat16().double()
        ours = moe.MoETransformer(config).to(DEVICE, torch.bfloat16)
        ours.load_state_dict(exact.state_dict())
        lengths = torch.tensor(size.checked)
        tokens = torch.randint(config.vocab_size, (len(lengths), max(size.checked)))
        weights = torch.randn(*tokens.shape, config.hidden_size).double()
        draw = torch.rand(*tokens.shape, 1, config.num_experts).argsort(-1)
        given = draw[..., : config.num_experts_per_tok].to(torch.int16)

        def gradients(model, experts, tokens=tokens, lengths=lengths, weights=weights):
            model.zero_grad()
            device = next(model.parameters()).device
            experts = None if experts is None else experts.to(device)
            hidden, routes = model(tokens.to(device), lengths, experts)
            (hidden.double() * weights.to(device)).sum().backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            return hidden, routes.cpu(), grads

        _, chosen, _ = gradients(exact, None)
        for mode, again in ((m, k) for m in ("replayed", "live") for k in (False, True)):
            ours.checkpointing = again
            hidden, routes, grads = gradients(ours, given if mode == "replayed" else None)
            right, _, reference = gradients(exact, routes)  # a flipped expert is no error here
            gaps = {name: apart(grads[name], g) for name, g in reference.items()}
            worst = max(gaps, key=gaps.get)
            same = (routes.sort(-1).values == chosen.sort(-1).values).all(-1).float().mean()
            row = {"hidden": apart(hidden, right), "gradient": gaps[worst], "worst": worst}
            good = max(row["hidden"], row["gradient"]) < 2e-2 and grads.keys() == reference.keys()
            row |= {"routes_equal": float(same)} if mode == "live" else {}
            result(f"{shape} {mode}{' checkpointed' * again}", good, **row)
        n = size.timed
        many = torch.randint(config.vocab_size, (1, n), device=DEVICE)
        width = config.hidden_size * config.num_experts_per_tok * config.moe_intermediate_size * 3
        heads = config.num_attention_heads + config.num_key_value_heads
        width += 2 * config.hidden_size * config.head_dim * heads
        flops = 6 * n * width + 6 * n**2 * config.num_attention_heads * config.head_dim
        ours.checkpointing = False
        took = seconds(lambda ours=ours, many=many: ours(many)[0].sum().backward())
        result(f"{shape} speed", True, tokens_per_s=n / took, of_gemm=flops / took / gemm)
        del ours, exact


# --- training


def start_model(folder: Path, std: float = 0.08) -> Path:
    """The toy's shape with random weights, the same numbers on every machine, and its tokenizer."""
    config = moe.MoEConfig.from_dict(cold_start.CONFIG)
    moe.save_pretrained(cold_start.init_weights(moe.MoETransformer(config), 7, std), folder)
    cold_start.write_tokenizer(folder)
    return folder


def record(folder: Path) -> None:
    """What `training` trains on, sampled by an engine on a CPU: one step of 8 prompts x 8 responses."""
    start_model(folder / "start")
    flags = f"--model {folder}/start --out {folder}/recording --save-rollouts {RECORDED} --steps 1"
    flags += " --prompts-per-step 8 --group-size 8 --max-new-tokens 24 --precision fp32"
    flags += f" --reward {Path(__file__)}:parity_of_length"
    subprocess.run([sys.executable, "train.py", *flags.split()], cwd=ROOT, check=True)


def parity_of_length(prompt, response, answer, example) -> float:
    """A reward that random weights earn half of the time."""
    return float(len(response) % 2)


def update(out: Path, precision: str, offload: bool) -> None:
    """One gradient update by train.py's own functions: gradient before AdamW and weights after, to a file."""
    import train

    c = train.Config(model=str(start_model(out.with_suffix(".model"))), out=str(out), lr=1e-3)
    c = replace(c, precision=precision, offload_optimizer=offload, replay="R3", max_grad_norm=1e9)
    acc, config = train.start(c), moe.MoEConfig.from_pretrained(c.model)
    model, optimizer = train.make_model(c, config, acc)
    recorded = train.rollouts.Recorded(RECORDED, train.rollout.Rollout)
    batch = recorded.generate(range(8), 8, seed=(0, 0), first_prompt=0)
    batch, dropped = train.sound_responses(batch, config, c, train.Layout.of(c, acc))
    assert dropped == 0, dropped
    (minibatch,) = train.split(train.advantages(batch, c, acc), c)
    found, step = {}, optimizer.step

    def keep():
        for name, p in model.named_parameters():
            found[f"gradient {name}"] = p.grad.full_tensor().float().cpu()
        step()

    optimizer.step = keep
    train.update(model, optimizer, minibatch, c, acc)
    assert not minibatch.skipped, minibatch.skipped
    for name, p in model.named_parameters():
        found[f"weight {name}"] = p.detach().full_tensor().float().cpu()
    torch.save(found, out)


def training(size: Size, folder: Path) -> None:
    """The gradient within 5% of fp32 on the CPU; AdamW's change of the weights nearly parallel to its; offloading
    changes nothing but rounding."""
    found = {}
    cases = {"cpu": ("fp32", False, {"CUDA_VISIBLE_DEVICES": ""})}
    cases |= {name: ("bf16", name == "offloaded", {}) for name in ("plain", "offloaded")}
    for name, (precision, offload, environment) in cases.items():
        file = folder / f"update-{name}.pt"
        worker = ["--update", str(file), precision, str(int(offload))]
        run([str(Path(__file__)), *worker], **environment)
        found[name] = torch.load(file)
    start = moe.load_pretrained(folder / "update-cpu.model").state_dict()

    def flat(name: str, kind: str) -> torch.Tensor:
        named = ((k.removeprefix(kind), z) for k, z in found[name].items() if k.startswith(kind))
        return torch.cat([(z - start[k] * (kind == "weight ")).flatten() for k, z in named])

    cosine = torch.nn.functional.cosine_similarity
    for name in ("plain", "offloaded"):
        gap = apart(flat(name, "gradient "), flat("cpu", "gradient "))
        along = float(cosine(flat(name, "weight "), flat("cpu", "weight "), dim=0))
        result(name, gap < 5e-2 and along > 0.9, gradient=gap, update_cosine=along)
    gap = apart(flat("offloaded", "weight "), flat("plain", "weight "))
    result("offloaded against plain", gap < 5e-2, update=gap)


# --- parity


def used() -> float:
    free, whole = torch.cuda.mem_get_info() if CUDA else (0, 0)
    return (whole - free) / 1e9


def parity(size: Size, folder: Path, dtype: str, runner: str) -> None:
    """Three times sync, sample with the same seeds, sleep, compare with the trainer: mean |log mu - log pi_old| below
    2e-3 in bf16, 1e-2 in fp8, and no larger in a later cycle than by a half."""
    import numpy as np

    import replay
    import rollout
    import train
    from launch.lib import data

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    vllm = {"async_scheduling": False} if runner == "v1" else {}
    prompts = [e["tokens"] for e in data.load_prompts("addition", str(folder), 64, 0, size.prompts)]
    model = moe.load_pretrained(folder, DEVICE, torch.bfloat16)
    shapes = moe.stored_shapes(model.config)
    settings = {"dtype": dtype, "max_model_len": 128, "gpu_memory": 0.3, "load": False}
    engine = rollout.Engine(folder, shapes, **settings, **vllm)
    layout = train.Layout(engines=1, engine=0, member=0, tp=1)
    c, first, at_first = train.Config(), None, 0.0
    for cycle in range(3):
        begin = time.perf_counter()
        engine.sync(moe.hf_weights(model))
        synced = time.perf_counter() - begin
        batch = engine.generate(prompts, 8, max_new_tokens=48, temperature=1.0, seed=0)
        awake = used()
        engine.sleep()
        if CUDA:
            torch.cuda.empty_cache()
        asleep, first = used(), first or batch
        same = np.mean(
            [np.array_equal(a, b) for a, b in zip(first.tokens, batch.tokens, strict=True)]
        )
        sound, dropped = train.sound_responses(batch, model.config, c, layout)
        sound = replace(sound, adv=np.zeros(len(sound), np.float32))
        micro = sound.pad(range(len(sound))).to(DEVICE)
        with torch.no_grad():
            live, _, experts = train.logprobs(model, micro, None, c)
            replayed, _, _ = train.logprobs(model, micro, micro.experts_mu, c)
        inputs = torch.nn.functional.pad(micro.mask[:, 1:], (0, 1))
        agree = replay.routing_agreement(micro.experts_mu, experts, inputs)[0].mean()
        gaps = [(logp - micro.logp_rollout)[micro.mask].abs() for logp in (live, replayed)]
        mean = gaps[0].mean().item()
        at_first = mean if not cycle else at_first
        row = {"mean": mean, "max": gaps[0].max().item(), "mean_R3": gaps[1].mean().item()}
        row |= {"routes_equal": float(agree), "same_tokens": float(same), "dropped": dropped}
        row |= {"sync_s": synced, "awake_gb": awake, "asleep_gb": asleep}
        good = mean < {"bf16": 2e-3, "fp8": 1e-2}[dtype] and mean < 1.5 * at_first and not dropped
        result(f"{dtype} {runner} cycle {cycle}", good, **row)


# --- loop


def loop(size: Size, folder: Path, what: str) -> None:
    """train.py for a few steps, the engine's numbers held to the trainer's; `what` is toy, or layers-DTYPE."""
    from launch import plan

    out, model = folder / f"run-{what}", ROOT / "runs" / "cold-start"
    flags = f"--data addition --steps {size.steps} --prompts-per-step {size.prompts} --group-size 8"
    flags += f" --replay R3 --micro-batch-tokens 16384 --out {out}"
    layers = 0
    if what == "toy":
        model = folder / "toy"
        flags += " --max-new-tokens 48 --rollout-memory 0.3 --rollout-dtype fp8"
    else:
        flags += f" --max-new-tokens {size.new} --rollout-memory 0.35 --lr 1e-6"
        flags += f" --activation-checkpointing --rollout-dtype {what.removeprefix('layers-')}"
        fit = f"--gpu {'here' if CUDA else 'H200'} --gpus 1 --prompt-tokens 16 {flags}".split()
        for layers in size.layers:
            job = plan.parse([*fit, "--model", "qwen3-30b-a3b", "--layers", str(layers)])
            if not plan.problems(job):
                break
        else:
            raise SystemExit(f"not even {layers} layers fit: {plan.problems(job)}")
        model = random_layers(folder / f"layers-{layers}", layers, small=not CUDA)
    if (
        what != "toy" or not CUDA
    ):  # random weights add nothing up, but half of their answers are odd
        flags += f" --reward {Path(__file__)}:parity_of_length"
    run(["train.py", "--model", str(model), *flags.split()])
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    names = ("rollout_tokens_per_s", "train_tokens_per_s", "peak_memory_gb", "kl_rollout_train_k3")
    numbers = {name: row[name] for name in (*names, "logp_diff_mean", "grad_norm")}
    numbers |= {f"{name}_s": row["seconds"][name] for name in ("sync", "rollout", "update")}
    good = math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 and row["logp_diff_mean"] < 5e-2
    result(what, good and not row["dropped_responses"], layers=layers, **numbers)


def random_layers(folder: Path, layers: int, small: bool) -> Path:
    """The first layers of Qwen3-30B-A3B's shape with random weights, and the toy's tokenizer; narrow on a CPU."""
    from launch.plan import PUBLISHED

    sizes = {"num_hidden_layers": layers}
    if small:
        sizes |= {"hidden_size": 128, "num_experts": 16, "vocab_size": 1024}
    with torch.device("meta"):
        model = moe.MoETransformer(moe.MoEConfig.from_dict(PUBLISHED | sizes)).to(torch.bfloat16)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(0.0, 0.02)
    moe.save_pretrained(model, folder, torch.bfloat16)
    cold_start.write_tokenizer(folder)
    return folder


# --- all of it

STAGES = {  # stage: its parts, the arguments of each, and the seconds it may take
    "kernels": ([[]], 180),
    "training": ([[]], 240),
    "parity": ([[d, r] for r in ("default", "v1") for d in ("bf16", "fp8")], 180),
    "loop": ([["toy"], ["layers-fp8"], ["layers-bf16"]], 300),
}


def run(command: list[str], log=None, limit: float | None = None, **environment) -> int:
    """A Python process in the repository -> its exit code, -9 past the limit; without a log it must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        code = process.wait()
    if log is None and code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    return code


def part(name: str, arguments: list[str], size: str, out: Path, limit: float | None) -> bool:
    """Runs one part of a stage, prints its line, its rows and, of an engine, the kernels that vLLM names."""
    log, begin = out / f"{'-'.join([name, *arguments])}.log", time.perf_counter()
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if arguments[1:] == ["v1"] else {}
    if name in ("parity", "loop", "warm"):
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
    command = [str(Path(__file__)), "--size", size, "--out", str(out), "--part", name, *arguments]
    with log.open("w") as file:
        code = run(command, file, limit, **environment)
    text, took = log.read_text(errors="replace"), time.perf_counter() - begin
    end = "ok" if not code else f"FAILED ({'limit' if code == -9 else code}), see {log}"
    print(f"{' '.join([name, *arguments])}: {end}, {took:.0f} s", flush=True)
    for line in re.findall(r"^RESULT (.*)$", text, re.M):
        row = json.loads(line)
        words = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
        print(f"  {'  '.join(words[2:])}  {row['part']}{'' if row['ok'] else '  NOT AS EXPECTED'}")
    if name == "parity":
        for line in sorted({x.split("] ")[-1] for x in text.splitlines() if KERNELS.search(x)}):
            print(f"  vLLM: {line[:150]}")
    sys.stdout.flush()
    return not code


def main() -> int:
    parser = argparse.ArgumentParser("gpu_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; none: all")
    parser.add_argument("--size", choices=SIZES, default="full", help="small: for CPUs")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-check")
    parser.add_argument("--record", action="store_true", help="sample training's batch, on a CPU")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--update", nargs=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    out, size = a.out.resolve(), SIZES[a.size]
    if unknown := set(a.stages) - STAGES.keys():
        parser.error(f"no stage {unknown.pop()}, only {', '.join(STAGES)}")
    out.mkdir(parents=True, exist_ok=True)
    if a.record:
        record(out)
    elif a.update:
        update(Path(a.update[0]), a.update[1], a.update[2] == "1")
        sys.stdout.flush()
        os._exit(0)
    elif a.part:
        name, *arguments = a.part
        torch.manual_seed(0)
        if name == "warm":
            parity(SIZES["small"], toy(out), "bf16", "default")
        elif name == "kernels":
            kernels(size)
        elif name == "training":
            training(size, out)
        else:
            {"parity": parity, "loop": loop}[name](
                size, toy(out) if name == "parity" else out, *arguments
            )
        sys.stdout.flush()
        os._exit(int(result.failed))
    else:
        return check(a.stages or list(STAGES), a.size, out)
    return 0


def toy(out: Path) -> Path:
    """The toy after its cold start, made by `check`; the untrained one at the small size."""
    return out / "toy"


def check(stages: list[str], size: str, out: Path) -> int:
    """Set-up and a warm part without a limit, then the stages; exit code 1 if any part failed."""
    name = torch.cuda.get_device_name(0) if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {time.strftime('%F')}", flush=True)
    if {"parity", "loop"} & set(stages):
        if size == "small":
            start_model(out / "toy", 0.012)  # tame: bf16 is close to exact
        else:
            run(["launch/cold_start.py", "--out", str(out / "toy")])
            part("warm", [], size, out, None)
    good = True
    for stage in (s for s in STAGES if s in stages):
        parts, limit = STAGES[stage]
        for arguments in parts:
            good &= part(stage, arguments, size, out, limit)
    print("ok" if good else "NOT as expected")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
