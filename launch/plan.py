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

import moe
import train

PUBLISHED = {  # config.json of Qwen/Qwen3-30B-A3B, as far as moe.py reads it
    "architectures": [moe.ARCHITECTURE], "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
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
# prime-rl's peaks for Qwen3-30B-A3B with FSDP on 8 H200 (benchmarks/baselines @559b447, 16k and 64k tokens) exceed the
# arithmetic below by 3.3 times its gathered buffers and half of its activations: kernels' workspace, streams, fragments.
SLACK_BUFFERS, SLACK_ACTIVATIONS = 3.3, 0.5
MFU = 0.166  # theirs, without recomputation counted
# vLLM's decode step: share of the HBM's speed, s a step, s a sequence and step; and what a published run took beyond it.
DECODE = {"hbm": 0.6, "step": 4e-3, "sequence": 12e-6, "beyond": 1.3}
SYNC_TENSOR = 110e-6  # s of Python a tensor in vLLM's reload, measured on a CPU
ENGINE_TOKENS, ENGINE_SEQUENCES = 16384, 256  # rollout.device_arguments, train.make_engine


@dataclass(frozen=True)
class Row:
    """One line of the plan: a number and how it comes about, in words."""

    name: str
    value: float
    formula: str
    unit: str = "GB"

    def __str__(self) -> str:
        shown = self.value / {"GB": 1e9, "KB": 1e3}.get(self.unit, 1)
        number = f"{shown:,.0f}" if self.unit == "" else f"{shown:,.2f}"
        return f"  {self.name:<42}{number:>15} {self.unit:<3} {self.formula}"


def total(rows: list[Row]) -> float:
    return sum(row.value for row in rows)


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
    cuda_kernels: bool = (
        True  # False: the CPU's norms, attention and expert sum, which keep more for backward
    )

    @cached_property
    def count(self) -> dict[str, int]:
        """Parameters: of all, of the largest layer, of the root (embedding, head, norm), used by a token, quantized."""
        c = self.config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
        norms, gate = 2 * c.head_dim + 2 * c.hidden_size, c.num_experts * c.hidden_size
        expert, dense = (
            3 * c.hidden_size * width for width in (c.moe_intermediate_size, c.intermediate_size)
        )
        moe_layers, vocab = (
            c.num_hidden_layers - len(c.dense_layers),
            c.vocab_size * c.hidden_size,
        )
        mlps = [c.num_experts * expert + gate] * bool(moe_layers) + [dense] * bool(c.dense_layers)
        fixed = attention + norms  # of every layer
        root = vocab * (1 if c.tie_word_embeddings else 2) + c.hidden_size
        experts = moe_layers * c.num_experts * expert
        mlp = experts + moe_layers * gate + len(c.dense_layers) * dense
        return {
            "total": c.num_hidden_layers * fixed + mlp + root,
            "layer": fixed + max(mlps),
            "root": root,
            "head": vocab,
            "active": c.num_hidden_layers * fixed
            + moe_layers * (c.num_experts_per_tok * expert + gate)
            + len(c.dense_layers) * dense
            + vocab,
            "experts": experts,
            "linear": experts + c.num_hidden_layers * attention + len(c.dense_layers) * dense,
            "largest": c.num_experts * expert * 2 // 3 if moe_layers else vocab,
        }

    @property
    def shards(self) -> int:
        return self.gpus // self.run.hsdp_replicas

    @property
    def width(self) -> int:  # b
        return 2 if self.run.precision == "bf16" else 4

    @property
    def response(self) -> int:
        return self.mean or self.run.max_new_tokens

    @property
    def responses(self) -> int:
        return self.run.prompts_per_step * self.run.group_size

    @property
    def rank_tokens(self) -> int:
        """Prompt and response tokens that one rank trains on in a step."""
        return math.ceil(self.responses * (self.prompt + self.response) / self.gpus)

    @property
    def micro_tokens(self) -> int:
        """Of the largest micro-batch: a sequence is not cut, and there may be fewer tokens than allowed."""
        longest = self.prompt + self.run.max_new_tokens
        return max(longest, min(self.run.micro_batch_tokens, self.rank_tokens))

    @property
    def micro_batches(self) -> int:
        """In one gradient update of one rank."""
        return math.ceil(self.rank_tokens / self.run.minibatches / self.micro_tokens)

    @property
    def link(self) -> float:
        return self.gpu.link if self.shards <= self.gpus_per_node else self.network


# --- training memory


def states(job: Job) -> list[Row]:
    share = job.count["total"] / job.shards
    return [
        Row("masters", 4 * share, "4 bytes x P / S"),
        Row("Adam moments", 8 * share, "two fp32 x P / S"),
    ]


def saved(job: Job) -> list[Row]:
    """What one token's pass through one layer keeps for backward, in bytes."""
    c, b = job.config, job.width
    D, K, F = c.hidden_size, c.num_experts_per_tok, c.moe_intermediate_size
    if len(c.dense_layers) == c.num_hidden_layers:
        K, F = 1, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = [
        Row("norms", b * (4 * D + q + kv), "b x (input and output of two: 4 D; of q and k: input)"),
        Row(
            "attention",
            b * (2 * q + 2 * kv) + 4 * c.num_attention_heads,
            "b x (q, k, v, output); log-sum-exp of a head",
        ),
        Row("router", 4 * c.num_experts + 36 * K, "fp32 of E experts; ids, order, gates of K"),
        Row("expert rows", b * K * 2 * D, "b x K x (input D, output D)"),
        Row("inside experts", b * K * 4 * F, "b x K x 4 F (gate, up, silu, product)"),
    ]
    if not job.cuda_kernels:
        twice = (8 - b) * (2 * D + q + kv)
        rows += [
            Row(
                "norms on a CPU",
                twice,
                "two fp32 copies of each norm's input, which then is not kept",
            ),
            Row("attention on a CPU", b * q, "b x the output, transposed"),
            Row("expert sum on a CPU", b * K * D, "b x K x D (index_add keeps its rows)"),
        ]
    return [replace(row, unit="KB") for row in rows]


def kept(job: Job) -> tuple[float, float]:
    """Bytes of activations that wait for backward, of each layer; and of the one layer that backward is in."""
    whole = total(saved(job)) * job.micro_tokens
    if not job.run.activation_checkpointing:
        return whole, whole
    return job.width * job.config.hidden_size * job.micro_tokens, whole


def routes(job: Job) -> float:
    """Bytes of the step's micro-batches on the GPU: int16 experts of vLLM and of pi_old, tokens, mask, log-probs."""
    per_token = job.config.num_hidden_layers * job.config.num_experts_per_tok
    return job.rank_tokens * (2 * 2 * per_token + 8 + 1 + 4 + 4)


def training(job: Job) -> dict[str, list[Row]]:
    """Rows of each moment of an update at which memory may peak; the states are in all of them."""
    n, b, L = job.count, job.width, job.config.num_hidden_layers
    each, inside = kept(job)
    kind = "layer inputs, b x D" if job.run.activation_checkpointing else "saved tensors"
    grads = 4 * n["total"] / job.shards
    early = grads if job.micro_batches > 1 else 4 * n["layer"] / job.shards
    row_of_head = f"4 fp32 blocks of {moe.LOGIT_CHUNK:,} (moe.LOGIT_CHUNK)"
    chunk = min(moe.LOGIT_CHUNK, job.micro_tokens * job.config.vocab_size)
    root = Row(
        "embedding and head, gathered", b * n["root"], "b x (embedding + head), all pass long"
    )
    layers = Row("gathered layers", 2 * b * n["layer"], "b x layer, this one and the next")
    head = Row("gradient of the head", b * n["head"], "b x V x D, until the end of backward")
    flight = [
        Row("gradient of a layer, whole", b * n["layer"], "b x layer"),
        Row("reduce-scatter input", 4 * n["layer"], "4 bytes x layer (reduced in fp32)"),
    ]
    ids = 8 * L * job.config.num_experts_per_tok * job.micro_tokens * (job.run.replay != "none")
    shared = [
        *states(job),
        root,
        Row("routes of the step", routes(job), "tokens of a rank x (2 x int16 x L x K + 17)"),
        Row("replayed routes", ids, "int64 x L x K x tokens of a micro-batch"),
    ]

    def gradients(value: float) -> Row:
        return Row(
            "gradients", value, "4 bytes x P / S; in a first micro-batch, of the layers done"
        )

    def waiting(layers: int) -> Row:
        return Row(
            "activations", layers * each, f"{layers} layers x {job.micro_tokens:,} tokens x {kind}"
        )

    one = Row(
        "one layer in backward", inside, f"{job.micro_tokens:,} tokens x what a layer saves (below)"
    )
    step = [*states(job), gradients(grads)]
    return {
        "loss": [*shared, waiting(L), head, Row("logits", 4 * 4 * chunk, row_of_head)]
        + [gradients(early if job.micro_batches > 1 else 0)],
        "last layer": [*shared, gradients(early), layers, head, *flight, waiting(L - 1), one],
        "first layer": [*shared, gradients(grads), layers, head, *flight, one],
        "end": [*shared, gradients(grads)]
        + [Row("gradients of embedding and head", (b + 4) * n["root"], "whole, (b + 4) x both")],
        "optimizer": [*step, Row("routes of the step", routes(job), "as above")],
    }


def peak(job: Job) -> tuple[str, list[Row]]:
    """The moment of an update that needs most, without what the tracker cannot see."""
    return max(training(job).items(), key=lambda moment: total(moment[1]))


def unseen(job: Job) -> list[Row]:
    """What a GPU holds in an update beside the tensors of the arithmetic."""
    names = ("embedding and head, gathered", "gathered layers", "gradient of a layer, whole")
    names += ("gradient of the head", "reduce-scatter input")
    rows = training(job)["last layer"]
    buffers = total([row for row in rows if row.name in names])
    activations = total(
        [row for row in rows if row.name in ("activations", "one layer in backward")]
    )
    slack = SLACK_BUFFERS * buffers + SLACK_ACTIVATIONS * activations
    words = (
        f"{SLACK_BUFFERS} x gathered buffers + {SLACK_ACTIVATIONS} x activations (prime-rl's peaks)"
    )
    return [
        Row("workspace, streams, fragments", slack, words),
        Row("engine asleep", ASLEEP, "CUDA graphs, buffers (sleep level 2)"),
        Row("CUDA context, NCCL", CONTEXT, "estimate"),
    ]


# --- the engine


def engine_weights(job: Job) -> float:
    """Bytes a GPU."""
    n, tp = job.count, job.run.rollout_tp
    if job.run.engine_dtype != "fp8":
        return n["total"] * (4 if job.run.engine_dtype == "fp32" else 2) / tp
    part = job.config.moe_intermediate_size / tp
    padding = n["experts"] * (128 * math.ceil(part / 128) / part - 1)  # to whole 128 x 128 blocks
    return (2 * (n["total"] - n["linear"]) + n["linear"] + padding) / tp


def kv_token(job: Job) -> int:
    """Bytes of one token's keys and values on one GPU of an engine."""
    heads = math.ceil(job.config.num_key_value_heads / job.run.rollout_tp)
    number = 4 if job.run.engine_dtype == "fp32" else 2
    return 2 * heads * job.config.head_dim * job.config.num_hidden_layers * number


def engine(job: Job) -> list[Row]:
    """The engine's memory while it is awake: all that --rollout-memory lets it claim."""
    c = job.config
    weights = engine_weights(job)
    rows = 2 * c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    work = ENGINE_TOKENS * rows + 2 * 4 * ENGINE_SEQUENCES * c.vocab_size
    claim = job.run.rollout_memory * job.gpu.memory
    dtype, tp = job.run.engine_dtype, job.run.rollout_tp
    words = {"fp8": "1 byte x experts and attention + 2 x the rest", "fp32": "4 bytes x P"}
    return [
        Row("engine weights", weights, f"{words.get(dtype, '2 bytes x P')}, / --rollout-tp {tp}"),
        Row("engine workspace", work, f"{ENGINE_TOKENS:,} tokens x K rows + logits of 256"),
        Row("KV cache", claim - weights - work, "rest of --rollout-memory x the GPU's memory"),
    ]


def sequences(job: Job) -> dict[str, int]:
    """Responses of an engine in a step; how many run at once; how many of mean length its cache holds."""
    prompts = math.ceil(job.run.prompts_per_step * job.run.rollout_tp / job.gpus)
    cache = max(0, int(engine(job)[2].value // kv_token(job)))
    held, all_ = cache // (job.prompt + job.response), prompts * job.run.group_size
    running = max(1, min(ENGINE_SEQUENCES, all_, cache // (job.prompt + job.response // 2)))
    return {"all": all_, "running": running, "held": held, "cache": cache}


def phases(job: Job) -> dict[str, list[Row]]:
    """What a GPU holds in each phase of a step: the rows of its most demanding moment."""
    n, tp = job.count, job.run.rollout_tp
    context = Row("CUDA context, NCCL, CUDA graphs", CONTEXT, "estimate")
    old = Row("routes of the last step", routes(job), "held until the next mini-batches are made")
    awake = [*states(job), *engine(job), old, context]
    number = 4 if job.run.engine_dtype == "fp32" else 2
    flight = number * n["layer"] * (1 + 1 / tp)
    return {
        "sync": [
            *awake,
            Row(
                "one parameter, gathered",
                4 * n["largest"],
                "4 bytes x the largest parameter (experts)",
            ),
            Row(
                "one layer in flight", flight, "engine dtype x layer: as sent, and as vLLM loads it"
            ),
        ],
        "rollout": awake,
        "train": [*peak(job)[1], *unseen(job)],
    }


# --- time


def flops(job: Job) -> tuple[float, float]:
    """Of one token's forward pass: matrices; attention at the mean sequence."""
    c = job.config
    context = (job.prompt + job.response) / 2
    heads = c.num_attention_heads * c.head_dim
    return 2 * job.count["active"], 4 * heads * context * c.num_hidden_layers


def training_time(job: Job) -> list[Row]:
    forward, tokens = sum(flops(job)), job.rank_tokens
    passes = 4 if job.run.activation_checkpointing else 3
    old = 1 - 1 / job.run.minibatches
    head = 2 * job.count["head"]
    work = tokens * ((passes + old) * forward + head)
    whole = 1 - 1 / job.shards
    moved = 2 * job.width + 4 + old * job.width
    micro = job.micro_batches * job.run.minibatches
    bytes_ = micro * moved * job.count["total"] * whole
    if job.run.hsdp_replicas > 1:
        bytes_ += micro * 2 * 4 * job.count["total"] / job.shards * job.link / job.network
    return [
        Row(
            "compute",
            work / job.gpu.flops,
            f"tokens x ({passes} + {old:g} old) forwards / peak FLOP/s",
            "s",
        ),
        Row(
            "FSDP traffic",
            bytes_ / job.link,
            f"{micro} passes x (2 gathers + fp32 reduce-scatter) / link",
            "s",
        ),
        Row(
            "expected",
            max(tokens * (3 + old) * forward / (MFU * job.gpu.flops), bytes_ / job.link),
            f"tokens x {3 + old:g} forwards / {MFU:.1%} of peak (prime-rl's 8 H200)",
            "s",
        ),
    ]


def rollout_time(job: Job) -> list[Row]:
    c, s, tp = job.config, sequences(job), job.run.rollout_tp
    steps = max(job.run.max_new_tokens, math.ceil(s["all"] * job.response / s["running"]))
    dense = c.num_experts_per_tok / c.num_experts
    touched = 1 - (1 - dense) ** s["running"]  # share of the experts, if tokens chose at random
    experts = job.count["experts"] / job.count["total"]
    read = engine_weights(job) * (1 - experts + experts * touched)
    read += s["running"] * kv_token(job) * (job.prompt + job.response / 2)
    compute = s["running"] * sum(flops(job)) / tp / job.gpu.flops
    step = max(read / job.gpu.hbm, compute)
    taken = read / job.gpu.hbm / DECODE["hbm"] + DECODE["step"] + DECODE["sequence"] * s["running"]
    return [
        Row(
            "decode steps",
            steps,
            f"longest response, or {s['all']} responses / {s['running']} at once",
            "",
        ),
        Row(
            "bound", steps * step, "steps x max((weights + half-full KV) / HBM, FLOPs / peak)", "s"
        ),
        Row(
            "expected",
            DECODE["beyond"] * steps * taken,
            "1.3 x steps x (bytes / 0.6 HBM + 4 ms + 12 us x sequences)",
            "s",
        ),
    ]


def sync_time(job: Job) -> list[Row]:
    gathered = 4 * job.count["total"] * (1 - 1 / job.shards)
    tensors = sum(1 for _ in moe.stored_shapes(job.config))
    python = tensors * SYNC_TENSOR
    return [
        Row("bound", gathered / job.link, "4 bytes x P (fp32 as stored) gathered / link", "s"),
        Row(
            "expected",
            gathered / job.link + python,
            f"+ {tensors:,} tensors x 110 us of Python",
            "s",
        ),
    ]


# --- the verdict


def problems(job: Job) -> list[str]:
    """What does not fit, in words; empty if all does."""
    found = []
    for name, rows in phases(job).items():
        if total(rows) > job.gpu.memory:
            need, have = total(rows) / 1e9, job.gpu.memory / 1e9
            found.append(f"{name} needs {need:.1f} GB of {have:.1f} GB a GPU")
    longest = job.prompt + job.run.max_new_tokens
    if (cache := sequences(job)["cache"]) < longest:
        found.append(f"the KV cache holds {cache:,} tokens, the longest sequence has {longest:,}")
    if longest > (limit := job.config.max_position_embeddings):
        found.append(f"prompt + response is {longest:,} long, max_position_embeddings {limit:,}")
    return found


def report(job: Job) -> str:
    n, s, c = job.count, sequences(job), job.run
    moment, _ = peak(job)
    moments = {name: total(rows) / 1e9 for name, rows in training(job).items()}
    lines = ["parameters"]
    lines += [
        Row(
            "all",
            n["total"],
            "embedding, head, norms, and L layers of attention, router, E experts",
            "",
        ),
        Row(
            "used by a token",
            n["active"],
            "K of E experts; head, but not the embedding's look-up",
            "",
        ),
        Row("largest layer", n["layer"], "the unit that FSDP gathers", ""),
    ]
    for name, rows in phases(job).items():
        what = {"train": f", at its peak ({moment})", "sync": ", the engine woken"}.get(name, "")
        lines += [f"{name}: a GPU holds{what}", *(row for row in rows if row.value)]
        lines += [Row("sum", total(rows), f"of {job.gpu.memory / 1e9:.1f} GB")]
    lines += ["train, at other moments (tensors alone)"]
    lines += ["  " + ", ".join(f"{name} {value:.1f} GB" for name, value in moments.items())]
    lines += ["one layer saves for backward, a token", *saved(job)]
    lines += [
        "what sleeps when",
        "  sync     engine wakes: weights are mapped, written, then the KV cache; gradients do not exist",
        "  rollout  nothing sleeps; masters and moments stay on the GPU; gradients do not exist",
        "  train    engine sleeps (level 2): weights and KV cache are dropped, not kept on the host",
        "a step",
        Row("responses", job.responses, f"{c.prompts_per_step} prompts x {c.group_size}", ""),
        Row("new tokens", job.responses * job.response, f"responses x {job.response:,}", ""),
        Row("trained tokens a GPU", job.rank_tokens, "responses x (prompt + response) / GPUs", ""),
        Row(
            "micro-batches an update",
            job.micro_batches,
            f"of up to {job.micro_tokens:,} tokens",
            "",
        ),
        Row("gradient updates", c.minibatches, "--minibatches", ""),
        Row(
            "sequences the KV cache holds",
            s["held"],
            f"of {job.prompt + job.response:,} tokens, an engine",
            "",
        ),
        Row("sequences at once", s["running"], f"of an engine's {s['all']}; 256 at most", ""),
        Row("routes on the host", 2 * routes(job), "as on the GPU, and vLLM's own record; a rank"),
        "rollout, seconds",
        *rollout_time(job),
        "old log-probs and updates, seconds",
        *training_time(job),
        "sync, seconds",
        *sync_time(job),
    ]
    hours = sum(t(job)[-1].value for t in (rollout_time, training_time, sync_time)) / 3600
    lines += [Row("a step, expected", hours, f"= {hours * job.gpus:.1f} GPU hours", "h")]
    return "\n".join(map(str, lines))


def parse(argv: list[str] | None = None) -> Job:
    """ValueError for flags that make no sense."""
    parser = argparse.ArgumentParser("plan.py", description=__doc__.splitlines()[0])
    parser.epilog = f"and every flag of train.py; --model may be {' or '.join(MODELS)}"
    parser.add_argument("--gpu", choices=GPUS, default="H200", help="kind of GPU")
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
    run.check(own.gpus)
    known = MODELS.get(run.model)
    config = moe.MoEConfig.from_dict(known) if known else moe.MoEConfig.from_pretrained(run.model)
    if own.layers:
        config = replace(config, num_hidden_layers=own.layers)
    network, mean = own.network_gb * 1e9, own.mean_new_tokens
    return Job(
        config, run, GPUS[own.gpu], own.gpus, own.gpus_per_node, network, own.prompt_tokens, mean
    )


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
