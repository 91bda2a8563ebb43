"""How fast: a train step against transformers, sampling against vLLM, an RL step against TRL; and how it grows.

    python launch/bench.py                               # every row; one table, launch/results/bench.json
    python launch/bench.py --rows 1,2 --models toy --no-trl

Hardware: 2 idle CPU cores, 0.1 hours, 8 GB; with a GPU the same rows run there (not yet run). Expect 30 lines, "ok"
behind each target that is met. No ratio is printed where others used the machine meanwhile. Last run: 2026-12-01.

    row 1  forward and backward of the objective (train.update without AdamW), transformers' Qwen3-MoE on the same
           weights, tokens and precision at its best settings; equal lengths, and lengths up to four times the mean
    row 2  Engine.generate over LLM.generate without log-probs and routes; the price of each
    row 3  a whole RL step, train.py's over that of TRL's GRPOTrainer (in an environment made on demand)
    row 4  growth with T, E, batch and ranks: exponents of a fit of log time, or log memory, to log size

Numbers are medians of at least five repeats after a warm-up, candidates taking turns.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

# As in train.py; read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import loss
import moe
import rollout
import train
from launch import cold_start
from launch.lib.data import addition

ROOT = Path(__file__).resolve().parents[1]
PROMPT, LR, TRL = 16, 1e-6, "trl==1.16.0"
CPUS, LOAD = len(os.sched_getaffinity(0)), 0.25  # LOAD: of one core, more than that is busy
CUDA = torch.cuda.is_available()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONG = cold_start.CONFIG | {"max_position_embeddings": 16384}
MODELS = {  # the shapes
    "toy": LONG,
    "mid": LONG | {
        "hidden_size": 512, "vocab_size": 32768, "num_attention_heads": 8, "head_dim": 64,
        "num_experts": 32, "moe_intermediate_size": 256,
    },
    "tiny": LONG | {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16},
}  # fmt: skip


@dataclass
class Line:
    """One line of the table: `ours` and `other` in `unit`, their ratio, and what is wanted of it (">= 2.5")."""

    row: int
    case: str
    ours: float
    unit: str
    other: float | None = None
    against: str = ""
    ratio: float | None = None
    target: str = ""
    more: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """How much work: sequences and mean tokens of a step's batch by model, and the points of row 4."""

    models: tuple[str, ...] = ("toy", "mid")
    batch: dict = field(default_factory=lambda: {"toy": (128, 48), "mid": (16, 48)})
    repeats: int = 5
    sampling: tuple[int, int, int] = (32, 8, 64)  # P, G, new tokens
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    experts: tuple[int, ...] = (8, 32, 128)
    batches: tuple[int, ...] = (16, 32, 64, 128)
    head: tuple[int, ...] = (2048, 4096, 8192)  # tokens
    grown: str = "mid"  # the model of the rows over E
    trl_steps: int = 6


SMALLEST = Sizes(
    ("tiny",), {"tiny": (6, 20)}, 5, (2, 2, 4), (32, 64), (8, 16), (2, 4), (64, 128), "tiny", 6
)


# --- measuring


class Meanwhile:
    """What others took of all cores since this was made, 0 to 1; 0 where the system does not say."""

    def __init__(self):
        self.begin = self.read()

    def read(self) -> tuple[float, float]:
        try:
            words = Path("/proc/stat").read_text().split(None, 9)[1:9]
        except OSError:
            return time.perf_counter(), 0.0
        user, nice, system, _, _, irq, soft, steal = (
            int(w) / os.sysconf("SC_CLK_TCK") for w in words
        )
        own = sum(os.times()[:4])  # this process and its ended children
        return time.perf_counter(), user + nice + system + irq + soft + steal - own

    def others(self) -> float:
        seconds, used = (b - a for a, b in zip(self.begin, self.read(), strict=True))
        return max(0.0, used / seconds / os.cpu_count())


def clock(f) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    f()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def by_turns(candidates: dict, repeats: int) -> dict[str, float]:
    """Name -> median seconds of `repeats` calls, after one that does not count; the candidates take turns."""
    times = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, f in candidates.items():
            seconds = clock(f)
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(z) for name, z in times.items()}


def peak_memory(f) -> float:
    """Bytes that a call holds at its most, beyond what was there: of the process on a CPU, of torch on a GPU."""
    gc.collect()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = memory("VmRSS")
    f()
    return max(memory("VmHWM") - before, 1.0)


def memory(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(key)).split()[1])


def exponent(sizes, values) -> float:
    """b of the least-squares fit values = a * sizes ** b."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


# --- the two sides of a train step


def make_folder(name: str, out: Path, **changes) -> Path:
    """A checkpoint of random weights with the toy's tokenizer, made once."""
    if not out.exists():
        config = moe.MoEConfig.from_dict(MODELS[name] | changes)
        moe.save_pretrained(cold_start.init_weights(moe.MoETransformer(config), 0, 0.04), out)
        cold_start.write_tokenizer(out)
    return out


def make_batch(config: moe.MoEConfig, n: int, mean: int, spread: bool) -> rollout.Rollout:
    """n responses with random tokens and routes; `spread` lengths are exponential, cut at four times the mean."""
    rng = np.random.default_rng(0)
    share = -np.log1p(-(np.arange(n) + 0.5) / n) if spread else np.ones(n)
    lengths = rng.permutation(np.clip(share * mean, PROMPT + 2, 4 * mean).astype(int))
    L, E, K = config.num_hidden_layers, config.num_experts, config.num_experts_per_tok
    routes = [rng.random((t - 1, L, E)).argsort(-1)[..., :K].astype(np.uint8) for t in lengths]
    return rollout.Rollout(
        tokens=[rng.integers(2, config.vocab_size, t, np.int32) for t in lengths],
        prompt_lens=np.full(n, PROMPT, np.int32),
        logp_rollout=[np.full(t - PROMPT, -math.log(config.vocab_size), np.float32) for t in lengths],
        routes=routes,
        truncated=np.zeros(n, bool),
        group_ids=np.arange(n, dtype=np.int32) // 8,
        texts=[""] * n,
        adv=rng.normal(size=n).astype(np.float32),
    )  # fmt: skip


# Stands where train.update expects AdamW, and leaves weights and gradients as they are.
KEEP = SimpleNamespace(param_groups=[{}], state={}, step=lambda: None, zero_grad=lambda: None)


class Ours:
    """This repository's training side, as train.py builds it: FSDP2, micro-batches, the objective."""

    def __init__(self, acc, folder: Path, precision: str, batch: rollout.Rollout | None = None):
        self.c = train.Config(model=str(folder), precision=precision, lr=LR, max_grad_norm=1e9)
        self.acc, self.config = acc, moe.MoEConfig.from_pretrained(folder)
        policy = train.MixedPrecisionPolicy(DTYPES[precision], reduce_dtype=torch.float32)
        acc.state.fsdp_plugin.mixed_precision_policy = policy
        self.model, self.optimizer = train.make_model(self.c, self.config, acc)
        if batch is not None:
            self.take(batch)

    def take(self, batch: rollout.Rollout) -> "Ours":
        layout = train.Layout(engines=1, engine=0, member=0, tp=1)
        batch, _ = train.sound_responses(batch, self.config, self.c, layout)
        (self.batch,) = train.split(batch, self.c)
        return self

    def step(self) -> None:
        self.model.zero_grad()
        batch = replace(self.batch, measured=[], loss=0.0)
        train.update(self.model, KEEP, batch, self.c, self.acc)

    @torch.no_grad()
    def logp(self, micro) -> torch.Tensor:
        return train.logprobs(self.model, micro.to(self.acc.device), None, self.c)[0]

    def gradients(self) -> dict[str, torch.Tensor]:
        """By transformers' names."""
        found = {k: p.grad.full_tensor() for k, p in self.model.named_parameters()}
        return {k if k.startswith("lm_head") else f"model.{k}": g for k, g in found.items()}


class Theirs:
    """transformers' Qwen3MoeForCausalLM on a folder: the same objective on padded sequences."""

    def __init__(self, folder: Path, batch: rollout.Rollout, amp: bool, dtype, device):
        from transformers import Qwen3MoeForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        self.batch, self.amp, self.device = batch, amp, device
        self.settings = ("sdpa", "grouped_mm", len(batch))

    def use(self, settings: tuple[str, str, int]) -> "Theirs":
        """Attention, experts, sequences in a pass."""
        self.settings = settings
        self.model.set_attn_implementation(settings[0])
        self.model.set_experts_implementation(settings[1])
        return self

    def logp(self, micro) -> torch.Tensor:
        """(B, T - PROMPT), the log-probs of what follows the prompt; logits of these positions alone."""
        T = micro.tokens.shape[1]
        real = torch.arange(T, device=self.device) < micro.lengths.to(self.device)[:, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            logits = self.model(
                micro.tokens,
                attention_mask=None if real.all() else real.long(),
                use_cache=False,
                logits_to_keep=T - PROMPT + 1,
            ).logits[:, :-1]
        targets = micro.tokens[:, PROMPT:]
        return -F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")

    def step(self) -> None:
        self.model.zero_grad()
        for rows in np.array_split(np.arange(len(self.batch)), len(self.batch) // self.settings[2]):
            micro = self.batch.pad(list(rows)).to(self.device)
            logp = self.logp(micro)
            mu, mask = micro.logp_rollout[:, PROMPT:], micro.mask[:, PROMPT:]
            policies = (logp, logp.detach(), mu)
            loss.minirl_loss(*policies, micro.adv, mask, denom=len(self.batch))[0].backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters()}


def tune(folder: Path, batch, precision: str, device, found: Theirs | None) -> Theirs:
    """transformers at its best on this batch, each setting in turn, one call each after a first one.

    `found` on equal lengths keeps numbers and experts; attention and the size of a pass are tried again on padding.
    """
    n, best, least = len(batch), None, math.inf
    config = moe.MoEConfig.from_pretrained(folder)
    work = max(map(len, batch.tokens)) * n * config.num_experts_per_tok * config.num_hidden_layers
    copied = 12 * work * config.moe_intermediate_size * config.hidden_size  # bytes of batched_mm
    experts = ["grouped_mm", "eager"] + (["batched_mm"] if copied < 4e9 else [])
    sizes, kinds = [n, *([n // 4] if found and n >= 8 else [])], [(False, torch.float32)]
    if precision == "bf16":
        kinds = [(True, torch.float32), (False, torch.bfloat16)]  # autocast; a model in bf16
    if found:
        experts, kinds = [found.settings[1]], [(found.amp, found.model.dtype)]
    for amp, dtype in kinds:
        side, now = Theirs(folder, batch, amp, dtype, device), ["sdpa", experts[0], n]
        for place, choices in ((1, experts), (0, ("sdpa", "eager")), (2, sizes)):
            seconds = {}
            for choice in choices:
                side.use((*now[:place], choice, *now[place + 1 :]))
                try:
                    if side.model.lm_head.weight.grad is None:
                        side.step()
                    seconds[choice] = clock(side.step)
                except (RuntimeError, ValueError):  # grouped_mm refuses what autocast mixes
                    continue
            now[place] = min(seconds, key=seconds.get)
        if min(seconds.values()) < least:
            best, least = side.use(tuple(now)), min(seconds.values())
    return best


# --- row 1: a train step


def agreement(ours: Ours, theirs: Theirs) -> dict[str, float]:
    """How far the two sides are apart: the gradient, relative; the log-probs, the largest difference in nats."""
    ours.step()
    theirs.step()
    mine, reference = ours.gradients(), theirs.gradients()
    square = sum(float((mine[k].float() - g.float()).norm()) ** 2 for k, g in reference.items())
    size = sum(float(g.float().norm()) ** 2 for g in reference.values())
    micro = theirs.batch.pad(range(len(theirs.batch))).to(theirs.device)
    with torch.no_grad():
        gap = (ours.logp(micro)[:, PROMPT:] - theirs.logp(micro)) * micro.mask[:, PROMPT:]
    found = {"gradient_gap": (square / size) ** 0.5, "logp_gap": float(gap.abs().max())}
    return found | {"logp_gap_mean": float(gap.abs().sum() / micro.mask.sum())}


def train_rows(acc, sizes: Sizes, folder: Path) -> list[Line]:
    lines = []
    for name in sizes.models:
        path = make_folder(name, folder / name)
        for precision in DTYPES:
            equal, theirs = train_case(acc, sizes, name, path, precision, False, None)
            spread, _ = train_case(acc, sizes, name, path, precision, True, theirs)
            lines += [equal, spread]
    return lines


def train_case(acc, sizes, name, path, precision, spread, theirs) -> tuple[Line, Theirs]:
    """The line of one model, precision and kind of lengths, and transformers as it was measured."""
    batch = make_batch(moe.MoEConfig.from_pretrained(path), *sizes.batch[name], spread)
    ours = Ours(acc, path, precision, batch)
    theirs = tune(path, batch, precision, acc.device, theirs)
    gaps = agreement(ours, theirs)
    seconds = by_turns({"ours": ours.step, "theirs": theirs.step}, sizes.repeats)
    tokens = sum(map(len, batch.tokens))
    speed = {side: tokens / t for side, t in seconds.items()}

    case = f"{name} {precision} {'spread' if spread else 'equal'}"
    attention, experts, n = theirs.settings
    how = f"transformers{' autocast' * theirs.amp} {attention} {experts} x{n}"
    ratio, target = speed["ours"] / speed["theirs"], ">= 2.5" if spread else ">= 1.3"
    line = Line(1, case, speed["ours"], "tok/s", speed["theirs"], how, ratio, target, gaps)
    return line, theirs


# --- row 2: sampling


def engine_rows(sizes: Sizes, folder: Path) -> list[Line]:
    path = make_folder(sizes.models[0], folder / sizes.models[0])
    P, G, new = sizes.sampling
    shapes = moe.stored_shapes(moe.MoEConfig.from_pretrained(path))
    room = {"max_model_len": 2 * PROMPT + new, "max_num_seqs": P * G, "kv_cache_gb": 0.5}
    plain = rollout.Engine(path, shapes, routes=False, **room)
    routed = rollout.Engine(path, shapes, routes=True, **room)
    lines = sampling(plain, routed, sizes)
    plain.close()
    routed.close()
    return lines


def sampling(plain, routed, sizes: Sizes) -> list[Line]:
    from vllm import SamplingParams

    P, G, new = sizes.sampling
    prompts = [list(e["prompt"].encode()) for e in addition(P, 0)]
    requests = [{"prompt_token_ids": p} for p in prompts]
    wanted = {"n": G, "temperature": 1.0, "max_tokens": new, "ignore_eos": False}

    def vllm(engine, **more):
        params = [SamplingParams(seed=i * G, **wanted, **more) for i in range(P)]
        return lambda: engine.llm.generate(requests, params, use_tqdm=False)

    def ours(engine):
        ask = {"max_new_tokens": new, "temperature": 1.0, "seed": 0}
        return lambda: engine.generate(prompts, G, **ask)

    turns = {
        "vllm": vllm(plain),
        "logp": vllm(plain, logprobs=0, flat_logprobs=True),
        "routes": vllm(routed),
        "ours": ours(plain),
        "ours, routes": ours(routed),
    }

    def count(made) -> int:
        if isinstance(made, rollout.Rollout):
            return sum(map(len, made.logp_rollout))
        return sum(len(a.token_ids) for o in made for a in o.outputs)

    tokens = {name: count(f()) for name, f in turns.items()}
    seconds = by_turns(turns, 2 * sizes.repeats - 1)
    speed = {name: tokens[name] / seconds[name] for name in turns}
    base, how = speed["vllm"], "vLLM's LLM.generate, no log-probs, no routes"
    cases = {
        "ours": ("generate", ">= 0.95"), "ours, routes": ("generate, routes", ">= 0.85"),
        "logp": ("vLLM with log-probs", ""), "routes": ("vLLM with routes", ""),
    }  # fmt: skip
    return [
        Line(2, case, speed[name], "tok/s", base, how, speed[name] / base, target)
        for name, (case, target) in cases.items()
    ]


# --- row 3: a whole step


def run(command: list, timeout: float, **env) -> str:
    """What a command prints; RuntimeError with its last words."""
    try:
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=timeout, cwd=ROOT,
            env=os.environ | env, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1][-200:])
    return done.stdout


def trl_python(folder: Path) -> Path:
    """An environment with TRL on top of this one's packages, so that torch and transformers are the same."""
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists() or made.read_text() != TRL:
        venv.create(folder, clear=True, with_pip=True)
        found = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(run([python, "-c", found], 60).strip())
        (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run([python, "-m", "pip", "install", "--quiet", TRL], 300)
        made.write_text(TRL)
    return python


def step_row(sizes: Sizes, folder: Path, trl: Path | None) -> list[Line]:
    name, (P, G, new), steps = sizes.models[0], sizes.sampling, sizes.trl_steps
    path, case = make_folder(name, folder / name), f"{name} bf16, {P} x {G}, {new} new"
    flags = {"model": path, "out": folder / "ours", "steps": steps, "lr": LR, "save-every": 0}
    flags |= {"prompts-per-step": P, "group-size": G, "max-new-tokens": new}
    run([sys.executable, "train.py", *(f"--{k}={v}" for k, v in flags.items())], 200)
    logged = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    phases = ("sync", "rollout", "old", "update")  # not save and eval
    spent = [json.loads(line)["seconds"] for line in logged[1:]]
    ours = statistics.median(sum(s.get(k, 0) for k in phases) for s in spent)
    if trl is None:
        return [Line(3, case, ours, "s", against="TRL: --no-trl")]
    try:
        python, seconds = trl_python(trl), {}
        for bf16 in (0, 1):
            ask = [path, ROOT, folder / "trl", P, G, new, steps if bf16 else 2, bf16]
            printed = run([python, "launch/bench_trl.py", *ask], 300).splitlines()[-1]
            seconds[bf16] = statistics.median(json.loads(printed)[1:])
    except (RuntimeError, OSError, ValueError) as error:
        return [Line(3, case, ours, "s", against=f"TRL could not run: {error}")]
    best = min(seconds, key=seconds.get)
    how = f"TRL {'bf16' if best else 'fp32'}, its best; transformers samples"
    return [Line(3, case, ours, "s", seconds[best], how, seconds[best] / ours, ">= 12")]


# --- row 4: growth


def growth_rows(acc, sizes: Sizes, folder: Path) -> list[Line]:
    lines = over_tokens(acc, sizes, folder) + over_experts(acc, sizes, folder)
    return [*lines, over_head(sizes, acc.device), over_ranks(sizes, folder)]


def grown(case: str, sizes, values, unit: str, target="") -> Line:
    """The last value, the first, and the exponent between them."""
    sizes, values = list(sizes), list(values)
    points = {"sizes": sizes, "values": values}
    how = f"at {sizes[0]}; fitted exponent over {len(sizes)} sizes"
    return Line(4, case, values[-1], unit, values[0], how, exponent(sizes, values), target, points)


def grow(name: str, letter: str, steps: dict, repeats: int, target: str) -> list[Line]:
    """The lines of time and memory of steps, size -> call."""
    times, last = by_turns(steps, repeats), list(steps)[-1]
    memory = [peak_memory(f) / 1e6 for f in steps.values()]
    ms = [1e3 * t for t in times.values()]
    return [
        grown(f"{name} step, {letter} {last}", steps, ms, "ms", target),
        grown(f"{name} memory, {letter} {last}", steps, memory, "MB", target and "<= 1.05"),
    ]


def over_tokens(acc, sizes: Sizes, folder: Path) -> list[Line]:
    """One sequence of T tokens, with and without its attention; then B sequences of 64."""
    name = sizes.models[0]
    ours = Ours(acc, make_folder(name, folder / name), "fp32")
    c, attend = ours.config, {}

    def step(n: int, T: int):
        batch = make_batch(c, n, T, False)
        return lambda: ours.take(batch).step()

    heads = [(n, c.head_dim) for n in (c.num_attention_heads, *2 * [c.num_key_value_heads])]
    for T in sizes.lengths:
        qkv = [torch.randn(T, *h, device=acc.device, requires_grad=True) for h in heads]
        packed = moe.Packed.of([T], acc.device)
        attend[T] = lambda qkv=qkv, at=packed: moe.attend(*qkv, at).square().sum().backward()
    long = grow(name, "T", {T: step(1, T) for T in sizes.lengths}, sizes.repeats, "")
    alone = by_turns(attend, sizes.repeats)
    whole = zip(long[0].more["values"], alone.values(), strict=True)
    rest = [max(ms - 1e3 * c.num_hidden_layers * a, 1e-3) for ms, a in whole]
    return [
        *long,
        grown(f"{name} step less attention", sizes.lengths, rest, "ms", "<= 1.05"),
        *grow(name, "batch", {n: step(n, 64) for n in sizes.batches}, sizes.repeats, "<= 1.05"),
    ]


def over_experts(acc, sizes: Sizes, folder: Path) -> list[Line]:
    """E grows, a token's experts do not: the same work on more weights. Two layers."""
    name, steps = sizes.grown, {}
    for E in sizes.experts:
        path = make_folder(name, folder / f"{name}-{E}", num_experts=E, num_hidden_layers=2)
        config = moe.MoEConfig.from_pretrained(path)
        steps[E] = Ours(acc, path, "fp32", make_batch(config, *sizes.batch[name], False)).step
    time_, memory_ = grow(name, "E", steps, sizes.repeats, "")
    ratio, how = time_.ours / time_.other, f"at E {sizes.experts[0]}: last over first"
    return [replace(time_, ratio=ratio, against=how, target="<= 1.3"), memory_]


def over_head(sizes: Sizes, device) -> Line:
    """Log-probs forward and backward: V*T at least one block of logits, and growing."""
    c = moe.MoEConfig.from_dict(MODELS["tiny"] | {"vocab_size": 32768})
    model, memory = cold_start.init_weights(moe.MoETransformer(c), 0).to(device), []
    for T in sizes.head:
        x = torch.randn(T, c.hidden_size, device=device, requires_grad=True)
        targets = torch.zeros(T, device=device).long()
        both = lambda x=x, t=targets: model.logprobs(x, t)[0].sum().backward()  # noqa: E731
        memory.append(peak_memory(both) / 1e6)
    products = [c.vocab_size * T for T in sizes.head]
    return grown(f"head memory, V*T {products[-1]:,}", products, memory, "MB", "<= 0.1")


def over_ranks(sizes: Sizes, folder: Path) -> Line:
    """The same mini-batch on one rank and on two, one thread each."""
    name, speeds = sizes.models[0], []
    path = make_folder(name, folder / name)
    work = json.dumps([str(path), *sizes.batch[name], sizes.repeats])
    for n in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", n, __file__, "--rank", work]
        speeds.append(json.loads(run(command, 120, OMP_NUM_THREADS="1").splitlines()[-1]))
    line = grown(f"{name} fp32 step, 2 ranks", (1, 2), speeds, "tok/s")
    return replace(line, against="on 1 rank, 1 thread each; exponent of speed")


def rank(work: str) -> None:
    """One of torchrun's processes: its share of the mini-batch; rank 0 prints tokens/s of all."""
    path, n, mean, repeats = json.loads(work)
    torch.set_num_threads(1)
    acc = train.start(train.Config(model=path))
    whole = make_batch(moe.MoEConfig.from_pretrained(path), n, mean, True)
    ours = Ours(acc, path, "fp32", whole.select(range(acc.process_index, n, acc.num_processes)))
    seconds = by_turns({"step": ours.step}, repeats)["step"]
    acc.wait_for_everyone()
    if acc.is_main_process:
        print(json.dumps(sum(map(len, whole.tokens)) / seconds), flush=True)
    os._exit(0)  # as train.py ends


# --- the table


def met(line: Line) -> str:
    if line.ratio is None or not line.target:
        return ""
    sense, number = line.target.split()
    fine = line.ratio >= float(number) if sense == ">=" else line.ratio <= float(number)
    return "ok" if fine else "MISSED"


def table(lines: list[Line]) -> str:
    head = ("row", "case", "ours", "other", "unit", "ratio", "target", "", "other is")
    cells = [head]
    for z in sorted(lines, key=lambda z: z.row):
        numbers = [
            "" if v is None else f"{v:,.4g}" if v < 1e3 else f"{v:,.0f}" for v in (z.ours, z.other)
        ]
        ratio = "" if z.ratio is None else f"{z.ratio:.2f}"
        cells.append((str(z.row), z.case, *numbers, z.unit, ratio, z.target, met(z), z.against))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = {2, 3, 5}
    rows = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in cells
    ]  # fmt: skip
    return "\n".join(r.rstrip() for r in rows)


def measure(args, folder: Path) -> tuple[list[Line], dict[str, float]]:
    """All lines that are asked for, and how much of the machine others took in each section."""
    sizes = SMALLEST if args.smallest else replace(Sizes(), models=tuple(args.models))
    acc = train.start(train.Config())
    trl = None if args.no_trl else args.trl
    sections = (
        (1, lambda: train_rows(acc, sizes, folder)),
        (4, lambda: growth_rows(acc, sizes, folder)),
        (2, lambda: engine_rows(sizes, folder)),
        (3, lambda: step_row(sizes, folder, trl)),
    )
    lines, others = [], {}
    for row, make in sections:
        if row not in args.rows:
            continue
        meanwhile, begin = Meanwhile(), time.time()
        found = make()
        others[row] = meanwhile.others()
        spent = f"{time.time() - begin:.0f} s, others used {others[row]:.1%} of the machine"
        print(f"row {row}: {spent}", flush=True)
        if others[row] > args.busy or args.load > LOAD * CPUS:
            found = [replace(line, ratio=None) for line in found]
        lines += found
    return lines, others


def parse(argv=None) -> argparse.Namespace:
    results, env = ROOT / "launch" / "results" / "bench.json", ROOT / "runs" / "bench-trl"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rows", default="1,2,3,4", help="which, as 1,2,3")
    add("--models", default="toy,mid", help="of row 1; the first of the others")
    add("--threads", type=int, default=CPUS, help="of torch, in this process")
    add("--busy", type=float, default=0.1, help="share of the machine that others may use")
    add("--no-trl", action="store_true", help="row 3 without TRL")
    add("--trl", type=Path, default=env, help="folder of its environment")
    add("--out", type=Path, default=results, help="JSON file")
    add("--smallest", action="store_true", help="a test of this file, no figures")
    add("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.rows, args.models = {int(r) for r in args.rows.split(",")}, args.models.split(",")
    return args


def main() -> None:
    args = parse()
    if args.rank:
        return rank(args.rank)
    args.load = os.getloadavg()[0]
    torch.set_num_threads(args.threads)
    begin = time.time()
    with TemporaryDirectory() as folder:
        lines, others = measure(args, Path(folder))
    device = torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine()
    state = {"load": args.load, "others": others, "seconds": time.time() - begin}
    record = {
        "date": time.strftime("%Y-%m-%d"), "device": device, "cpus": CPUS, "threads": args.threads,
        "torch": torch.__version__, "models": {k: MODELS[k] for k in args.models}, **state,
        "lines": [dataclasses.asdict(z) | {"met": met(z)} for z in lines],
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{device}, {CPUS} cores, {args.threads} threads, load {args.load:.2f}")
    print(table(lines))
    if any(o > args.busy for o in others.values()) or args.load > LOAD * CPUS:
        print("the machine was busy: no ratios where others used it. Run again when it is idle.")
    sys.stdout.flush()
    os._exit(0)  # as train.py ends


if __name__ == "__main__":
    main()
