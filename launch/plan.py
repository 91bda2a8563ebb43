r"""Will it fit, and how long will a step take? Memory and time of a run, on paper: no engine, no GPU, no weights.

    python launch/plan.py --model qwen3-30b-a3b --gpu H200 --gpus 8 --prompts-per-step 64 --group-size 16 \
        --max-new-tokens 32768 --rollout-dtype fp8 --rollout-tp 2 --activation-checkpointing

Hardware: any CPU, 4 s. Expect a table and "fits" with exit code 0, or what does not with exit code 1. Last run 2026-11-30.

It takes train.py's flags as they are, and its own: --gpu, --gpus, the prompt's length, the mean response. Its training
memory is checked against FSDP2's own memory tracker on the whole 30B graph (tests/test_30b.py); what kernels, streams
and the allocator add is taken from runs that others published, and nothing here was measured on a GPU.

Letters as in moe.py: L layers, D width, H heads, E experts, K experts per token, F expert width, V vocabulary; and
P parameters, S ranks that share one copy of the model, b bytes of a number in --precision. GB are 10^9 bytes.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import moe
import train
from launch.lib import flags
from launch.lib.data import model_folder

PUBLISHED = {  # config.json of Qwen/Qwen3-30B-A3B, as far as moe.py reads it
    "architectures": [moe.ARCHITECTURE], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 40960, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
MODELS = {
    "qwen3-30b-a3b": PUBLISHED,
    "qwen3-30b-a3b-base": PUBLISHED | {"max_position_embeddings": 32768},
}


@dataclass(frozen=True)
class Gpu:
    memory: float  # bytes that torch can use
    flops: float  # dense bf16, a second
    hbm: float  # bytes a second
    link: float  # bytes a second to the other GPUs of a node, one way


# NVIDIA's data sheets (SXM boards; BF16 without sparsity, which is half of the printed figure; NVLink one way, half of
# the printed sum; PCIe 4 x16 where there is no NVLink). Memory: torch's total_memory, a little under the printed size.
GPUS = {
    "A100-80GB": Gpu(79.2 * 2**30, 312e12, 2.04e12, 300e9),
    "H100-80GB": Gpu(79.2 * 2**30, 989e12, 3.35e12, 450e9),
    "H200": Gpu(139.8 * 2**30, 989e12, 4.8e12, 450e9),
    "B200": Gpu(178.4 * 2**30, 2250e12, 7.7e12, 900e9),
    "L40S-48GB": Gpu(44.4 * 2**30, 362e12, 0.864e12, 32e9),
    "RTX4090-24GB": Gpu(23.5 * 2**30, 165e12, 1.008e12, 32e9),
}

CONTEXT = 2e9  # CUDA context and NCCL; an estimate
ASLEEP = 6e9  # CUDA graphs and buffers that vLLM keeps at sleep level 2: 5 to 8 GB by estimate
# Fitted to prime-rl's two peaks for Qwen3-30B-A3B with FSDP on 8 H200 (benchmarks/baselines @559b447, RL full, without
# moments: 74.6 GiB at 16k tokens, 105.4 at 64k, by their allocator); they exceed the
# arithmetic below by 3.8 times FSDP's buffers and 0.9 of the activations: other kernels, workspace, streams, fragments.
SLACK_BUFFERS, SLACK_ACTIVATIONS = 3.8, 0.9
MFU = 0.166  # theirs, without recomputation counted
# vLLM's decode step: share of the HBM's speed, s a step, s a sequence and step; and what a published run took beyond it.
DECODE = {"hbm": 0.6, "step": 4e-3, "seq": 12e-6, "beyond": 1.3}
SYNC_TENSOR = 110e-6  # s of Python a tensor in vLLM's reload, measured on a CPU
ENGINE_TOKENS, ENGINE_SEQUENCES = 16384, 256  # rollout.device_arguments, train.make_engine


@dataclass(frozen=True)
class Row:
    """One line of the plan: a number and how it comes about, in words."""

    name: str
    value: float
    words: str
    unit: str = "GB"

    def __str__(self) -> str:
        shown = self.value / {"GB": 1e9, "KB": 1e3}.get(self.unit, 1)
        number = f"{shown:,.2f}" if self.unit else f"{shown:,.0f}"
        return f"  {self.name:<32}{number:>15} {self.unit:<3} {self.words}"


def total(rows: list[Row]) -> float:
    return sum(row.value for row in rows)


@dataclass(frozen=True)
class Count:
    """Parameters of a model, by what becomes of them."""

    all: int
    active: int  # used by a token: K of E experts; the head, but not the embedding's look-up
    layer: int  # the largest, a unit of FSDP
    root: int  # embedding, head and last norm, another unit
    head: int
    experts: int
    linear: int  # experts and projections: what fp8 rounds
    largest: int  # of one tensor

    @classmethod
    def of(cls, c: moe.MoEConfig) -> "Count":
        D, E, K, dense = c.hidden_size, c.num_experts, c.num_experts_per_tok, len(c.dense_layers)
        L, sparse = c.num_hidden_layers, c.num_hidden_layers - dense
        heads = c.num_attention_heads + c.num_key_value_heads
        projections, norms = 2 * D * c.head_dim * heads, 2 * c.head_dim + 2 * D
        expert, mlp, gate = 3 * D * c.moe_intermediate_size, 3 * D * c.intermediate_size, E * D
        head = c.vocab_size * D
        root = head * (1 if c.tie_word_embeddings else 2) + D
        rest = L * (projections + norms) + sparse * gate + dense * mlp  # of the layers
        return cls(
            all=rest + sparse * E * expert + root,
            active=rest + sparse * K * expert + head,
            layer=projections + norms + (E * expert + gate if sparse else mlp),
            root=root,
            head=head,
            experts=sparse * E * expert,
            linear=sparse * E * expert + dense * mlp + L * projections,
            largest=max(head, E * expert * 2 // 3 if sparse else 0),
        )


@dataclass(frozen=True)
class Job:
    """A run of train.py on given GPUs: what the whole plan follows from."""

    config: moe.MoEConfig
    run: train.Config
    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    network: float = 50e9  # bytes a second and GPU between nodes, one way
    prompt: int = 1024  # tokens
    mean: int = 0  # response tokens; 0: all as long as allowed
    cuda_kernels: bool = True  # False: a CPU's, which keep more for backward

    @cached_property
    def count(self) -> Count:
        return Count.of(self.config)

    @property
    def shards(self) -> int:  # S
        return self.gpus // self.run.hsdp_replicas

    @property
    def width(self) -> int:  # b
        return 2 if self.run.precision == "bf16" else 4

    @property
    def engine_width(self) -> int:
        return 4 if self.run.engine_dtype == "fp32" else 2

    @property
    def response(self) -> int:
        return self.mean or self.run.max_new_tokens

    @property
    def longest(self) -> int:
        return self.prompt + self.run.max_new_tokens

    @property
    def responses(self) -> int:
        return self.run.prompts_per_step * self.run.group_size

    @property
    def rank_tokens(self) -> int:
        """Prompt and response tokens that one rank trains on in a step."""
        return math.ceil(self.responses * (self.prompt + self.response) / self.gpus)

    @property
    def micro_tokens(self) -> int:
        """Of the largest micro-batch: no sequence is cut, and there may be fewer than allowed."""
        return max(self.longest, min(self.run.micro_batch_tokens, self.rank_tokens))

    @property
    def micro_batches(self) -> int:
        """In one gradient update of one rank."""
        return math.ceil(self.rank_tokens / self.run.minibatches / self.micro_tokens)


# --- training memory


def states(job: Job) -> list[Row]:
    share = job.count.all / job.shards
    return [
        Row("masters", 4 * share, "4 bytes x P / S"),
        Row("Adam moments", 8 * share, "2 x 4 bytes x P / S"),
    ]


def buffers(job: Job) -> list[Row]:
    """What FSDP holds whole while backward is in a layer."""
    n, b = job.count, job.width
    return [
        Row("embedding, head, gathered", b * n.root, "b x both, from first to last layer"),
        Row("layers, gathered", 2 * b * n.layer, "b x layer: this one and the next"),
        Row("gradient of the head", b * n.head, "b x V D, until the end of backward"),
        Row("gradient of a layer", b * n.layer, "b x layer, whole"),
        Row("reduce-scatter input", 4 * n.layer, "4 bytes x layer: sums are fp32"),
    ]


def saved(job: Job) -> list[Row]:
    """What one token's pass through one layer keeps for backward, in bytes."""
    c, b = job.config, job.width
    D, K, F = c.hidden_size, c.num_experts_per_tok, c.moe_intermediate_size
    if len(c.dense_layers) == c.num_hidden_layers:
        K, F = 1, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    lse, ids = 4 * c.num_attention_heads, 36 * K
    rows = [
        Row("norms", b * (4 * D + q + kv), "b x (two inputs, two outputs, q, k before theirs)"),
        Row("attention", b * 2 * (q + kv) + lse, "b x (q, k, v, output), a log-sum-exp a head"),
        Row("router", 4 * c.num_experts + ids, "4 bytes x E, ids, order and gates of K"),
        Row("rows of experts", b * K * 2 * D, "b x K x 2 D: input, output"),
        Row("inside experts", b * K * 4 * F, "b x K x 4 F: gate, up, silu, product"),
    ]
    if not job.cuda_kernels:
        norms = (8 - b) * (2 * D + q + kv)
        rows += [
            Row("norms of a CPU", norms, "two fp32 copies of each input in its place"),
            Row("attention of a CPU", b * q, "b x output, transposed"),
            Row("sum of experts, CPU", b * K * D, "b x K D: index_add keeps its rows"),
        ]
    return [replace(row, unit="KB") for row in rows]


def activations(job: Job, layers: int) -> list[Row]:
    """Of `layers` layers that wait for backward, and of the one that backward is in."""
    tokens, inside = job.micro_tokens, total(saved(job))
    again = job.run.activation_checkpointing
    each = job.width * job.config.hidden_size if again else inside
    words = f"{layers} layers x {tokens:,} tokens x {'b D' if again else 'what a layer saves'}"
    return [
        Row("activations", layers * each * tokens, words),
        Row("one layer in backward", inside * tokens, f"{tokens:,} tokens x what a layer saves"),
    ]


def routes(job: Job) -> Row:
    """Of the micro-batch that is on the GPU, with tokens, masks and log-probs; the others are on the host."""
    a_token = job.config.num_hidden_layers * job.config.num_experts_per_tok
    value = job.micro_tokens * (6 * a_token + 17)
    return Row("routes", value, "micro-batch x int16 x L K: vLLM's, pi_old's, the router's")


def training(job: Job) -> dict[str, list[Row]]:
    """The rows of each moment of an update at which memory may peak; tensors only."""
    n, b, L = job.count, job.width, job.config.num_hidden_layers
    chunk = 4 * min(moe.LOGIT_CHUNK, job.micro_tokens * job.config.vocab_size)
    later = job.micro_batches > 1  # gradients of earlier micro-batches are there
    root, layers, head, *flight = buffers(job)
    replayed = (
        job.run.replay != "none" and job.micro_tokens * 8 * L * job.config.num_experts_per_tok
    )
    masters, moments = states(job)
    fixed = [masters, *([] if job.run.offload_optimizer else [moments]), routes(job)]
    passing = [*fixed, root, head, Row("routes replayed", replayed, "micro-batch x int64 x L K")]

    def gradients(of: float) -> Row:
        words = "4 bytes x P / S" if of == n.all else "4 bytes x layers that are done / S"
        return Row("gradients", 4 * of / job.shards, words)

    logits = Row("logits", 4 * chunk, "4 fp32 blocks of moe.LOGIT_CHUNK")
    both = Row("gradients of the root", (b + 4) * n.root, "(b + 4) x both")
    early, whole = gradients(n.all if later else n.layer), gradients(n.all)
    waiting, one = activations(job, L - 1)
    return {
        "loss": [*passing, gradients(n.all * later), activations(job, L)[0], logits],
        "last layer": [*passing, early, layers, *flight, waiting, one],
        "first layer": [*passing, whole, layers, *flight, one],
        "end of backward": [*fixed, root, whole, both],
        "optimizer": [masters, moments, routes(job), whole],
    }


def peak(job: Job) -> tuple[str, list[Row]]:
    """The moment of an update that needs most."""
    return max(training(job).items(), key=lambda moment: total(moment[1]))


def unseen(job: Job) -> list[Row]:
    """What a GPU holds in an update beside those tensors."""
    kept = activations(job, job.config.num_hidden_layers - 1)
    slack = SLACK_BUFFERS * total(buffers(job)) + SLACK_ACTIVATIONS * total(kept)
    words = (
        f"{SLACK_BUFFERS} x FSDP's buffers + {SLACK_ACTIVATIONS} x activations (prime-rl's peaks)"
    )
    return [
        Row("workspace, fragments", slack, words),
        Row("engine asleep", ASLEEP, "CUDA graphs, buffers; an estimate"),
        Row("CUDA context, NCCL", CONTEXT, "an estimate"),
    ]


# --- the engine


def engine_weights(job: Job) -> Row:
    n, tp, dtype = job.count, job.run.rollout_tp, job.run.engine_dtype
    if dtype != "fp8":
        value, words = job.engine_width * n.all, f"{job.engine_width} bytes x P"
    else:
        part = job.config.moe_intermediate_size / tp  # padded to whole blocks of 128
        padding = n.experts * (128 * math.ceil(part / 128) / part - 1)
        value, words = 2 * n.all - n.linear + padding, "1 byte x projections, experts; 2 x the rest"
    return Row("engine weights", value / tp, f"{words}; / {tp} (--rollout-tp)")


def kv_token(job: Job) -> int:
    """Bytes of one token's keys and values on one GPU of an engine."""
    c = job.config
    heads = math.ceil(c.num_key_value_heads / job.run.rollout_tp)
    return 2 * heads * c.head_dim * c.num_hidden_layers * job.engine_width


def engine(job: Job) -> list[Row]:
    """The engine awake: all that --rollout-memory lets it claim."""
    c, weights = job.config, engine_weights(job)
    width = c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    work = 2 * ENGINE_TOKENS * width + 8 * ENGINE_SEQUENCES * c.vocab_size
    rest = job.run.rollout_memory * job.gpu.memory - weights.value - work
    return [
        weights,
        Row("engine workspace", work, f"{ENGINE_TOKENS:,} tokens x K rows, logits of 256"),
        Row("KV cache", rest, f"the rest of {job.run.rollout_memory} x the GPU's memory"),
    ]


def sequences(job: Job) -> dict[str, int]:
    """An engine's responses in a step; its cache in tokens; how many responses run at once."""
    prompts = math.ceil(job.run.prompts_per_step * job.run.rollout_tp / job.gpus)
    cache, all_ = int(engine(job)[-1].value // kv_token(job)), prompts * job.run.group_size
    admitted = cache // (job.prompt + job.run.max_new_tokens // 4)  # rollout.Engine.generate
    running = min(ENGINE_SEQUENCES, all_, admitted, cache // (job.prompt + job.response // 2))
    return {"all": all_, "cache": max(cache, 0), "running": max(running, 1)}


def phases(job: Job) -> dict[str, list[Row]]:
    """What a GPU holds in each phase of a step, at its most demanding moment."""
    n, tp = job.count, job.run.rollout_tp
    stay = states(job)[: 1 if job.run.offload_optimizer else 2]
    awake = [*stay, *engine(job), Row("CUDA context, NCCL", CONTEXT, "an estimate")]
    flight = job.engine_width * n.layer * (1 + 1 / tp)
    return {
        "sync": [
            *awake,
            Row(
                "one parameter, gathered",
                job.engine_width * n.largest,
                "engine dtype x the largest tensor",
            ),
            Row("one layer in flight", flight, "engine dtype x layer: sent, and as vLLM loads it"),
        ],
        "rollout": awake,
        "train": [*peak(job)[1], *unseen(job)],
    }


# --- time


def forward(job: Job) -> float:
    """FLOPs of a token's forward pass, at the middle of a mean sequence."""
    c, middle = job.config, (job.prompt + job.response) / 2
    return (
        2 * job.count.active + 4 * c.num_attention_heads * c.head_dim * middle * c.num_hidden_layers
    )


def training_time(job: Job) -> list[Row]:
    c, tokens, N = job.run, job.rank_tokens, job.run.minibatches
    old, passes, micro = 1 - 1 / N, 4 if c.activation_checkpointing else 3, job.micro_batches * N
    work = tokens * ((passes + old) * forward(job) + 2 * job.count.head)
    gathers = (2 + old) * job.width + 4
    moved = micro * gathers * job.count.all * (1 - 1 / job.shards)
    link = job.gpu.link if job.shards <= job.gpus_per_node else job.network
    traffic = moved / link
    if c.hsdp_replicas > 1:
        traffic += micro * 2 * 4 * job.count.all / job.shards / job.network
    usual = tokens * (3 + old) * forward(job) / MFU / job.gpu.flops
    words = f"{micro} micro-batches x P x ({2 + old:g} gathers of b, reduction of 4 bytes) / link"
    return [
        Row("compute", work / job.gpu.flops, f"tokens x {passes + old:g} forwards / FLOP/s", "s"),
        Row("traffic", traffic, words, "s"),
        Row("bound", max(work / job.gpu.flops, traffic), "the larger: they overlap", "s"),
        Row("expected", max(usual, traffic), f"compute at {MFU:.1%} (prime-rl, 8 H200)", "s"),
    ]


def rollout_time(job: Job) -> list[Row]:
    c, s = job.config, sequences(job)
    steps = max(job.run.max_new_tokens, math.ceil(s["all"] * job.response / s["running"]))
    touched = 1 - (1 - c.num_experts_per_tok / c.num_experts) ** s["running"]
    untouched = (1 - touched) * job.count.experts / job.count.all
    read = engine_weights(job).value * (1 - untouched)
    read += s["running"] * kv_token(job) * (job.prompt + job.response / 2)
    compute = s["running"] * forward(job) / job.run.rollout_tp / job.gpu.flops
    usual = read / job.gpu.hbm / DECODE["hbm"] + DECODE["step"] + DECODE["seq"] * s["running"]
    one = max(read / job.gpu.hbm, compute)
    rule = f"longest, or {s['all']} responses, {s['running']} at once"
    return [
        Row("decode steps", steps, rule, ""),
        Row("bound", steps * one, "steps x max((weights + KV) / HBM, FLOPs / FLOP/s)", "s"),
        Row("expected", DECODE["beyond"] * steps * usual, "HBM at 60%, 4 ms a step; x 1.3", "s"),
    ]


def sync_time(job: Job) -> list[Row]:
    link = job.gpu.link if job.shards <= job.gpus_per_node else job.network
    gather = job.engine_width * job.count.all * (1 - 1 / job.shards) / link
    tensors = len(moe.stored_shapes(job.config))
    words = f"and {tensors:,} tensors x 110 us of Python"
    return [
        Row("bound", gather, "engine dtype x P / link", "s"),
        Row("expected", gather + tensors * SYNC_TENSOR, words, "s"),
    ]


# --- the verdict


def padded_experts(c: train.Config, config: moe.MoEConfig) -> str:
    """Why vLLM cannot sync these experts in fp8, or "".

    vLLM pads an expert's shard to whole blocks of 128. A padded layer keeps what it was sent, in
    bf16, until the last layer has come. Below 2 GB that does not matter. Read against vLLM 0.30.0.
    """
    width = config.moe_intermediate_size
    layers = config.num_hidden_layers - len(config.dense_layers)
    kept = 2 * 3 * width * config.hidden_size * config.num_experts * layers  # bytes
    if c.engine_dtype != "fp8" or width % (128 * c.rollout_tp) == 0 or kept < 2e9:
        return ""
    why = f"--rollout-tp {c.rollout_tp} with fp8: {width} / {c.rollout_tp} is no multiple of 128"
    return f"{why}, and {kept / 1e9:.0f} GB would wait on each GPU in a sync"


def problems(job: Job) -> list[str]:
    """What does not fit, in words; empty if all does."""
    found, have = [], job.gpu.memory
    for name, rows in phases(job).items():
        if (need := total(rows)) > have:
            found.append(f"{name} needs {need / 1e9:.1f} of {have / 1e9:.1f} GB a GPU")
    if (cache := sequences(job)["cache"]) < job.longest:
        found.append(f"KV cache: {cache:,} tokens, the longest sequence has {job.longest:,}")
    if why := padded_experts(job.run, job.config):
        found.append(why)
    if (limit := job.config.max_position_embeddings) < job.longest:
        found.append(f"prompt + response: {job.longest:,}, max_position_embeddings is {limit:,}")
    return found


SLEEP = """\
what sleeps when
  sync      the engine wakes: its weights are mapped and written, then its KV cache is mapped
  rollout   nothing: masters and (without --offload-optimizer) moments stay; no gradients exist
  train     the engine (level 2): weights and KV cache are dropped, not kept on the host;
            with --offload-optimizer the moments are on the GPU for the optimizer's step alone"""


def report(job: Job) -> str:
    n, s, c = job.count, sequences(job), job.run
    at = {"train": f", at its peak ({peak(job)[0]})", "sync": ", the engine woken"}
    lines = ["parameters"]
    lines += [
        Row("all", n.all, "embedding, head, norms; L x (attention, router, E experts)", ""),
        Row("used by a token", n.active, "K of E experts; no look-up of the embedding", ""),
        Row("largest layer", n.layer, "what FSDP gathers at a time", ""),
    ]
    for name, rows in phases(job).items():
        lines += [f"{name}: a GPU holds{at.get(name, '')}", *(row for row in rows if row.value)]
        lines += [Row("sum", total(rows), f"of {job.gpu.memory / 1e9:.1f} GB")]
    lines += ["train, tensors alone, at each moment"]
    lines += [Row(name, total(rows), "") for name, rows in training(job).items()]
    lines += ["a layer saves for backward, a token", *saved(job), SLEEP, "a step"]
    held = s["cache"] // (job.prompt + job.response)
    lines += [
        Row("responses", job.responses, f"{c.prompts_per_step} prompts x {c.group_size}", ""),
        Row("new tokens", job.responses * job.response, f"responses x {job.response:,}", ""),
        Row(
            "trained tokens of a GPU", job.rank_tokens, "responses x (prompt + response) / GPUs", ""
        ),
        Row("gradient updates", c.minibatches, "--minibatches", ""),
        Row("micro-batches an update", job.micro_batches, f"up to {job.micro_tokens:,} tokens", ""),
        Row("responses in the KV cache", held, f"of an engine's {s['all']}, at full length", ""),
        Row(
            "routes on the host",
            6 * job.rank_tokens * job.config.num_hidden_layers * job.config.num_experts_per_tok,
            "tokens of a rank x int16 x L K: aligned, padded, pi_old's",
        ),
    ]
    hours = 0
    times = {"rollout": rollout_time, "old and update": training_time, "sync": sync_time}
    for name, rows in times.items():
        lines += [f"time: {name}", *rows(job)]
        hours += rows(job)[-1].value / 3600
    lines += [Row("a step, expected", hours, f"{hours * job.gpus:.1f} GPU hours", "h")]
    return "\n".join(map(str, lines))


def this_gpu() -> Gpu:
    """The kind of GPU of this machine, with the memory that it has. ValueError for none, and for a kind not in GPUS."""
    if not torch.cuda.is_available():
        raise ValueError(f"--gpu here: torch sees none; name one of {', '.join(GPUS)}")
    found = torch.cuda.get_device_properties(0)
    squeezed = "".join(found.name.upper().split())
    kinds = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in squeezed]
    if not kinds:
        raise ValueError(f"--gpu here: {found.name} is none of {', '.join(GPUS)}; name the nearest")
    return replace(kinds[0], memory=found.total_memory)


def parse(argv: list[str] | None = None) -> Job:
    """ValueError for flags that make no sense."""
    parser = argparse.ArgumentParser("plan.py", description=__doc__.splitlines()[0])
    parser.epilog = f"and every flag of train.py; --model may be {' or '.join(MODELS)}"
    parser.add_argument("--gpu", choices=["here", *GPUS], default="H200", help="kind of GPU")
    parser.add_argument("--gpus", type=int, default=8, help="how many, over all nodes")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--network-gb", type=float, default=50, help="GB/s a GPU between nodes")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="longest prompt")
    parser.add_argument("--mean-new-tokens", type=int, default=0, help="0: --max-new-tokens")
    parser.add_argument(
        "--layers", type=int, default=0, help="as if the model had so many (0: all)"
    )
    own, rest = parser.parse_known_args(argv)
    run = train.Config.from_flags(rest)
    flags.check(run, own.gpus, min(own.gpus, own.gpus_per_node))
    known = MODELS.get(run.model)
    if known:
        config = moe.MoEConfig.from_dict(known)
    else:
        config = moe.MoEConfig.from_pretrained(model_folder(run.model, ["config.json"]))
    if own.layers:
        config = replace(config, num_hidden_layers=own.layers)
    parameters = sum(p.numel() for p in moe.meta_parameters(config).values())
    if Count.of(config).all != parameters:
        raise ValueError(f"moe.py has {parameters:,} parameters, Count.of another number: mend it")
    network, mean = own.network_gb * 1e9, own.mean_new_tokens
    gpu = this_gpu() if own.gpu == "here" else GPUS[own.gpu]
    return Job(config, run, gpu, own.gpus, own.gpus_per_node, network, own.prompt_tokens, mean)


def main(argv: list[str] | None = None) -> int:
    try:
        job = parse(argv)
    except ValueError as error:
        print(f"plan.py: error: {error}", file=sys.stderr)
        return 2
    print(report(job))
    wrong = problems(job)
    print("does not fit: " + "; ".join(wrong) if wrong else "fits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
