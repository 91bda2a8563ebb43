"""The loop: MiniRL (arXiv 2512.01374) on a Qwen3-MoE or Qwen3, with vLLM in the same process.

    each step   sync      theta -> theta_old: the weights stream into vLLM          Engine.sync
                sample    G responses to each of P prompts, log mu_old, e_mu, R     sample
                sleep     the engine makes room                                     Engine.sleep
                check     responses without sound log-probs or routes are dropped   sound_responses
                adv       A = R - mean of the group                                 advantages
                split     N mini-batches, cut into micro-batches                    split
                old       log pi_old and e_pi_old, unless pi still is pi_old        old_logprobs
                update    N times: log pi under replayed experts, MiniRL, AdamW     update
                evaluate  if it is due                                              evaluate
                log       a line, metrics.jsonl, samples.jsonl                      summarize
                save      a checkpoint, if it is due or a signal asks for it        checkpoint.save

It is the same path on one rank as on many. Accelerate's FSDP2 shards each decoder layer; masters
and Adam moments are fp32, compute is --precision. Each group of --rollout-tp ranks runs one engine,
samples its share of the prompts and trains on what it sampled.

Data order and sampling follow from (seed, step) alone, and weights and moments are all that a step
hands to the next. So a resumed run goes on as if it had never stopped: bit for bit on CPUs, and to
rounding on CUDA, whose backward kernels add in no fixed order.

    python train.py --model runs/cold-start --out runs/mine                    # the toy, on a CPU
    python train.py --model runs/cold-start --out runs/mine --resume auto      # go on after a stop
    torchrun --standalone --nproc-per-node 2 train.py --model runs/cold-start --out runs/two
"""

import ctypes
import importlib.util
import math
import os
import sys
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # threads that spin for long stall shared cores
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning a rank about NUMA binding

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, fsdp2_prepare_model, gather_object
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

import loss
import moe
import replay
import rollout
from launch.lib import checkpoint, flags, log, reward, rollouts
from launch.lib import data as dataset

DESCRIPTION = (
    f"{__doc__.splitlines()[0]} Under torchrun, with several ranks, it is the same command."
)


@dataclass
class Config:
    """Every flag of train.py. The comment behind a field is its --help."""

    # model and data
    model: str = "runs/cold-start"  # folder of a Qwen3-MoE or Qwen3 checkpoint, or its hub name
    data: str = "addition"  # JSONL files (commas between them), or the task addition
    prompt_template: str = ""  # text with {prompt} in it; empty: the model's chat template, if any
    reward: str = "auto"  # file.py:function; auto: math-verify, or the rule of the task addition
    seed: int = 0  # of data order, sampling and evaluation
    steps: int = 100  # rollout batches to train on

    # sampling
    prompts_per_step: int = 32  # P, prompts in a rollout batch, over all ranks
    group_size: int = 8  # G, responses to each prompt
    max_new_tokens: int = 64  # longest response, in tokens
    temperature: float = 1.0  # of sampling, and of the log-probs on both sides
    rollout_dtype: Literal["auto", "bf16", "fp32", "fp8", "int4"] = "auto"  # auto: --precision
    record_routes: bool = True  # vLLM's, for routing_agreement; without, only if R3 needs them

    # objective
    objective: Literal["minirl", "grpo", "cispo"] = "minirl"  # loss.py
    minibatches: int = 1  # N, gradient updates per rollout batch; 1 is on-policy
    replay: Literal["none", "R2", "R3"] = "none"  # pi_old's experts in pi, or vLLM's in both
    is_correction: bool = True  # weight pi/mu; without it pi/pi_old, ignoring the engines' gap
    is_cap: float = 5.0  # largest importance weight of a token
    clip: bool = True  # mask tokens that training has moved out of the trust region
    eps_low: float = 0.2  # trust region of pi/pi_old below 1, for negative advantages
    eps_high: float = 0.27  # and above 1, for positive ones
    length_norm: bool = False  # divide each response's sum by its length (an ablation)

    # optimization
    lr: float = 5e-5  # of AdamW, constant; for a 30B model 1e-6 is usual
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm
    precision: Literal["bf16", "fp32"] = "bf16"  # of compute; masters and moments are fp32

    # machine
    micro_batch_tokens: int = 16384  # tokens in one forward and backward pass
    activation_checkpointing: bool = False  # recompute layers in backward to save memory
    offload_optimizer: bool = False  # Adam's moments on the host but for the optimizer's step
    hsdp_replicas: int = 1  # copies of the sharded model, such as one per node
    rollout_tp: int = 1  # ranks that share one vLLM engine (tensor parallel)
    rollout_memory: float = 0.6  # share of each GPU's memory for vLLM while it is awake

    # evaluation
    eval_data: str = ""  # as --data; empty: none
    eval_every: int = 0  # steps between evaluations (0: one at the end)
    eval_samples: int = 4  # k, responses to each problem of --eval-data
    eval_temperature: float = 0.0  # of evaluation; 0: as training (0.01 is nearly greedy)

    # record
    out: str = "runs/run"  # folder of everything the run leaves
    resume: str = ""  # "auto": from the newest checkpoint in --out, if any; or from a folder
    save_every: int = 50  # steps between checkpoints (0: one at the end)
    save_rollouts: str = ""  # folder to keep what is sampled; empty: none
    load_rollouts: str = ""  # such a folder, to train on without an engine or data
    log_with: Literal["none", "tensorboard", "wandb"] = "none"  # Accelerate tracker besides files

    @property
    def engine_dtype(self) -> str:
        return self.precision if self.rollout_dtype == "auto" else self.rollout_dtype

    def keeps_routes(self, config: moe.MoEConfig) -> bool:
        """True if vLLM's routes are read: by R3, or by the metrics about them."""
        return config.has_experts and (self.record_routes or self.replay == "R3")

    @classmethod
    def from_flags(cls, argv: list[str] | None = None) -> "Config":
        return flags.parse(cls, argv, DESCRIPTION)


@dataclass(frozen=True)
class Layout:
    """Which ranks share an engine. This rank is number `member` of the `tp` ranks of `engine`."""

    engines: int
    engine: int
    member: int  # 0 is the one that reports what its engine did
    tp: int

    @classmethod
    def of(cls, c: Config, acc: Accelerator) -> "Layout":
        rank, tp = acc.process_index, c.rollout_tp
        return cls(acc.num_processes // tp, rank // tp, rank % tp, tp)

    def prompts(self, n: int) -> range:
        """Of n prompts, those that this engine answers."""
        return range(n * self.engine // self.engines, n * (self.engine + 1) // self.engines)

    def responses(self, n: int) -> range:
        """Of its engine's n responses, those that this rank trains on."""
        return range(self.member, n, self.tp)


# --- the loop


def train(c: Config, acc, config: moe.MoEConfig, data: list, held_out: list, folder) -> int:
    """One run, from the checkpoint `folder` if there is one.

    Returns the exit code: 0, or 128 + the number of the signal that asked to stop.
    """
    layout = Layout.of(c, acc)
    engine = make_engine(c, config, acc, data + held_out)  # first: it measures free memory
    model, optimizer = make_model(c, config, acc)
    begin = checkpoint.resume(model, optimizer, folder, c, acc)
    log.announce(model, c, acc)
    signals = checkpoint.Signals()
    watch = log.Watch()
    seconds = dict.fromkeys(log.PHASES, 0.0)

    bar = log.progress(range(begin, c.steps), "", acc, initial=begin, total=c.steps)
    for step in bar:
        examples = engine.examples(step) if c.load_rollouts else dataset.pick(data, step, c)

        with log.timed(seconds, "sync"):
            engine.sync(moe.hf_weights(model, engine.dtype))  # theta -> theta_old

        with log.timed(seconds, "rollout"):
            batch = sample(engine, examples, c.group_size, (c.seed, step), c, layout)  # y ~ mu_old
            engine.sleep()
            rollouts.save(step, batch, examples, c, layout)
            acc.wait_for_everyone()  # the slowest engine's time is everyone's

        batch, dropped = sound_responses(batch, config, c, layout)
        batch = advantages(batch, c, acc)
        minibatches = split(batch, c)

        with log.timed(seconds, "old"):
            old_logprobs(model, minibatches[1:], c, acc)  # in the first one pi is pi_old

        with log.timed(seconds, "update"):
            for minibatch in minibatches:
                update(model, optimizer, minibatch, c, acc)

        if held_out and due(c.eval_every, step, c):
            with log.timed(seconds, "eval"):
                evaluate(engine, model, held_out, step + 1, c, acc, layout)

        row = {"step": step} | summarize(batch, minibatches, dropped, c)
        row |= {"seconds": dict(seconds), "peak_memory_gb": log.peak_memory_gb()}
        log.write_step(row, {m.skipped for m in minibatches} - {""}, c, acc, bar)
        log.write_samples(step, examples, batch, c, acc)
        seconds = dict.fromkeys(log.PHASES, 0.0)
        del batch, minibatches  # or they would stay through the next rollout
        watch.check(row)

        asked = signals.asked()
        if asked or due(c.save_every, step, c):
            with log.timed(seconds, "save"):  # counted in the next step's line
                checkpoint.save(step + 1, model, optimizer, c, acc)
        if asked:
            return 128 + asked

    export(model, c, acc)
    engine.close()
    return 0


def evaluate(engine, model, held_out: list, step: int, c: Config, acc, layout: Layout) -> None:
    """k responses to each problem, with the same random numbers every time.

    Without a model, of the weights that the engine has.
    """
    if model:
        engine.sync(moe.hf_weights(model, engine.dtype))
    now = replace(c, temperature=c.eval_temperature or c.temperature)
    answers = sample(engine, held_out, c.eval_samples, (c.seed, 2**31), now, layout)
    engine.sleep()
    log.write_evaluation(step, answers, held_out, c, acc, layout)


def export(model, c: Config, acc: Accelerator) -> None:
    """OUT/hf, the folder that vLLM and transformers load."""
    dtype = torch.float32 if c.precision == "fp32" else torch.bfloat16
    with checkpoint.replacing(Path(c.out) / "hf", acc) as folder:
        moe.save_pretrained(model, folder, dtype, like=c.model, write=acc.is_main_process)


def due(every: int, step: int, c: Config) -> bool:
    return step + 1 == c.steps or (every > 0 and (step + 1) % every == 0)


# --- before the first step


def prepare(c: Config) -> tuple[moe.MoEConfig, list[dict], list[dict], Path | None]:
    """What a run starts from: the model's numbers, both lists of examples, the checkpoint.

    Whatever can be wrong with flags and files raises ValueError here, before an engine starts.
    """
    config = open_model(c)
    data, held_out = dataset.prepare(c, config.max_position_embeddings)
    shapes = {name: p.shape for name, p in moe.meta_parameters(config).items()}
    folder = checkpoint.open_folder(Path(c.out), c.resume, shapes)
    rollouts.check(c, config, folder)
    return config, data, held_out, folder


def open_model(c: Config) -> moe.MoEConfig:
    """The numbers of --model, after all checks that need no data and no --out.

    If --model was a name on the hub, it becomes the folder, so that the run's record is exact.
    """
    flags.check(c, int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if not c.load_rollouts and not importlib.util.find_spec("vllm"):
        raise ValueError("vLLM is not installed; launch/setup.sh installs it")
    c.model = dataset.model_folder(c.model)
    config = moe.MoEConfig.from_pretrained(c.model)
    moe.check_weights(config, c.model)
    flags.check_model(c, config)
    reward.find(c.reward)
    return config


def start(c: Config) -> Accelerator:
    """Process group and Accelerator: FSDP2 on one rank as on many, NCCL on CUDA, gloo on CPUs."""
    cuda = torch.cuda.is_available()
    keep_pages()
    if "RANK" not in os.environ:  # not under torchrun: a world of one rank, which needs no port
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    PartialState(cpu=not cuda, timeout=timedelta(hours=2))  # the wait for the slowest engine
    # Without several GPUs, Accelerate 1.15 ignores an FSDP plugin and says nothing.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    compute = torch.float32 if c.precision == "fp32" else torch.bfloat16
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False,  # it reads everything on rank 0; moe.load_weights does not
        mixed_precision_policy=MixedPrecisionPolicy(compute, reduce_dtype=torch.float32),
    )
    shards = dist.get_world_size() // c.hsdp_replicas
    mesh = ParallelismConfig(dp_replicate_size=c.hsdp_replicas, dp_shard_size=shards)
    return Accelerator(
        cpu=not cuda,
        fsdp_plugin=plugin,
        parallelism_config=mesh if c.hsdp_replicas > 1 else None,
        log_with=None if c.log_with == "none" else c.log_with,
        project_dir=c.out,
    )


def keep_pages() -> None:
    """glibc then reuses freed blocks of up to 256 MB; page faults cost a CPU much of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # other C libraries have none
    mallopt(-3, 2**28)  # M_MMAP_THRESHOLD
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def make_engine(c: Config, config: moe.MoEConfig, acc: Accelerator, examples: list, load=False):
    """One engine for each --rollout-tp ranks, which takes up to 256 sequences at once.

    Without `load` it has no weights before the first sync.
    """
    if c.load_rollouts:
        return rollouts.Recorded(c.load_rollouts, rollout.Rollout)
    prompts = math.ceil(c.prompts_per_step / Layout.of(c, acc).engines)
    engine = rollout.Engine(
        c.model,
        moe.stored_shapes(config),
        dtype=c.engine_dtype,
        max_model_len=min(dataset.longest(examples, c), config.max_position_embeddings),
        max_num_seqs=min(256, prompts * c.group_size),
        tensor_parallel=c.rollout_tp,
        gpu_memory=c.rollout_memory,
        seed=c.seed,
        routes=c.keeps_routes(config),
        progress=acc.is_main_process and sys.stderr.isatty(),
        load=load,
    )
    if acc.device.type == "cuda":
        # Packed micro-batches vary in size. Only now, for in such memory the CUDA graphs of ranks
        # that share an engine cannot reach each other's buffers.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return engine


def load_model(c: Config, config: moe.MoEConfig, acc: Accelerator):
    """--model, built without storage, sharded, then filled: no rank ever holds the whole."""
    with torch.device("meta"):
        model = moe.MoETransformer(config, checkpointing=c.activation_checkpointing)
    model = fsdp2_prepare_model(acc, model)
    register_fsdp_forward_method(model, "logprobs")  # FSDP gathers the head's weight for it
    model.to_empty(device=acc.device)
    moe.load_weights(model, c.model)
    return model


def make_model(c: Config, config: moe.MoEConfig, acc: Accelerator):
    """Model and AdamW, whose moments exist from the start, so that a checkpoint always has them."""
    model = load_model(c, config, acc)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, weight_decay=0.0, fused=True)
    for p in model.parameters():
        state = {"step": torch.zeros((), device=p.device)}
        for moment in checkpoint.MOMENTS:
            zeros = torch.zeros_like(p)
            state[moment] = zeros.cpu() if c.offload_optimizer else zeros
        optimizer.state[p] = state
    return model, optimizer


# --- sampling


def sample(engine, examples: list[dict], k: int, seed, c: Config, layout: Layout):
    """This engine's share of the examples, answered k times and rewarded.

    Group ids and seeds count over all engines.
    """
    share = layout.prompts(len(examples))
    batch = engine.generate(
        [examples[i]["tokens"] for i in share],  # x
        k,
        max_new_tokens=c.max_new_tokens,
        temperature=c.temperature,
        seed=seed,
        first_prompt=share.start,
    )
    if batch.rewards is not None:  # a recorded one
        return batch
    R = reward.score(c.reward, batch.texts, [examples[group] for group in batch.group_ids])
    return replace(batch, rewards=np.array(R, np.float32))


def sound_responses(batch: rollout.Rollout, config: moe.MoEConfig, c: Config, layout: Layout):
    """This rank's responses with sound log-probs and routes; how many of its own it dropped.

    Their record has experts_mu, if routes are kept. Raises log.Stopped if no response on any rank
    is sound: then it is a setting and no accident.
    """
    batch = batch.select(layout.responses(len(batch)))
    sound = [bool(np.isfinite(logp).all()) for logp in batch.logp_rollout]
    why = "log-probs are not finite"
    if c.keeps_routes(config):
        lengths = [len(tokens) for tokens in batch.tokens]
        experts_mu, unsound = replay.align_and_check(
            batch.routes, lengths, config.num_experts, config.dense_layers
        )
        batch = replace(batch, experts_mu=experts_mu)  # e_mu
        sound = [ok and experts is not None for ok, experts in zip(sound, experts_mu, strict=True)]
        why = unsound or why
    if not sum(gather_object([sum(sound)])):
        raise log.Stopped(f"no response can be trained on: {why}")
    return batch.select([b for b, ok in enumerate(sound) if ok]), sound.count(False)


def advantages(batch: rollout.Rollout, c: Config, acc: Accelerator) -> rollout.Rollout:
    """The record with A. The responses of a group may be spread over several ranks."""
    ours = list(zip(batch.group_ids.tolist(), batch.rewards.tolist(), strict=True))
    by_rank = gather_object([ours])
    everyone = torch.tensor(sum(by_rank, []), dtype=torch.float64)  # (all responses, 2)
    std_norm = loss.OBJECTIVES[c.objective][2]
    A = loss.group_advantages(everyone[:, 1], everyone[:, 0].long(), std_norm)
    first = sum(len(pairs) for pairs in by_rank[: acc.process_index])
    return replace(batch, adv=A[first : first + len(batch)].float().numpy())


# --- training


@dataclass
class MiniBatch:
    """One gradient update: this rank's micro-batches, and what was measured."""

    micro_batches: list[rollout.MicroBatch]
    responses: int  # over all ranks
    tokens: int  # response tokens over all ranks
    skipped: str = ""  # "loss" or "gradient", if that is not finite
    loss: float = 0.0  # this rank's part
    grad_norm: float = math.nan
    measured: list[dict] = field(default_factory=list)  # one for each micro-batch


def split(batch: rollout.Rollout, c: Config) -> list[MiniBatch]:
    """N mini-batches of whole groups, the same sets on any number of ranks.

    This rank's rows of each are cut into micro-batches. A rank with fewer micro-batches than
    another gets empty ones, since each pass is a collective.
    """
    minibatches = []
    for n in range(c.minibatches):
        rows = np.flatnonzero(batch.group_ids % c.minibatches == n).tolist()
        micro_batches = [batch.pad(piece) for piece in batch.cut(rows, c.micro_batch_tokens)]
        response_tokens = sum(len(batch.logp_rollout[b]) for b in rows)
        sizes = gather_object([(len(rows), response_tokens, len(micro_batches))])
        responses, tokens, passes = zip(*sizes, strict=True)  # each of all ranks

        for _ in range(max(passes) - len(micro_batches)):
            micro_batches.append(rollout.MicroBatch.empty())
        minibatches.append(MiniBatch(micro_batches, sum(responses), sum(tokens)))
    return minibatches


def logprobs(model, micro: rollout.MicroBatch, experts: Tensor | None, c: Config):
    """log pi and entropy of response tokens under these experts, two (B, T), 0 elsewhere.

    Third, the router's own choice (B, T, L, K). The hidden state of t - 1 predicts token t. Only
    those of response tokens pass through the head.
    """
    hidden, chosen = model(micro.tokens, micro.lengths, experts, live=True)
    is_response = micro.mask[:, 1:]  # (B, T - 1)
    hidden = hidden[:, :-1][is_response]  # (response tokens, D)
    targets = micro.tokens[:, 1:][is_response]
    logp, entropy = model.logprobs(hidden, targets, c.temperature)
    zeros = torch.zeros(micro.mask.shape, device=hidden.device)
    return zeros.masked_scatter(micro.mask, logp), zeros.masked_scatter(micro.mask, entropy), chosen


@torch.no_grad()
def old_logprobs(model, minibatches: list[MiniBatch], c: Config, acc: Accelerator) -> None:
    """log pi_old and e_pi_old of these mini-batches, by theta_old in the training engine.

    Under R3 e_pi_old is the router's choice on hidden states that e_mu produced.
    """
    every = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
    for micro in log.progress(every, "old", acc):
        on_device = micro.to(acc.device)  # a copy; what it finds is kept on the host
        experts = replay.experts_for_pi_old(c.replay, on_device.experts_mu)
        logp, _, chosen = logprobs(model, on_device, experts, c)
        micro.logp_old = logp.cpu()  # log pi_old
        micro.experts_old = chosen.cpu()  # e_pi_old


def update(model, optimizer, minibatch: MiniBatch, c: Config, acc: Accelerator) -> None:
    """One gradient update. What it measures stays in the mini-batch.

    In the first mini-batch of a step theta is theta_old: pi is pi_old, and recording it here saves
    a pass.
    """
    for micro in log.progress(minibatch.micro_batches, "update", acc):
        micro = micro.to(acc.device)
        experts = replay.experts_for_pi(c.replay, micro.experts_mu, micro.experts_old)
        logp, entropy, chosen = logprobs(model, micro, experts, c)  # log pi; chosen is e_pi
        if micro.logp_old is None:  # the first mini-batch: pi is pi_old, e_pi is e_pi_old
            micro.logp_old, micro.experts_old = logp.detach(), chosen

        if c.objective == "minirl":
            value, stats = loss.minirl_loss(
                logp=logp,  # pi
                logp_old=micro.logp_old,  # pi_old
                logp_rollout=micro.logp_rollout,  # mu_old
                adv=micro.adv,  # A
                mask=micro.mask,
                denom=minibatch.responses,
                eps_low=c.eps_low,
                eps_high=c.eps_high,
                is_cap=c.is_cap,
                is_correction=c.is_correction,
                clip=c.clip,
                length_norm=c.length_norm,
            )
        else:
            objective, denom_name, _ = loss.OBJECTIVES[c.objective]
            policies = (logp, micro.logp_old, micro.logp_rollout)
            trust = {"eps_low": c.eps_low, "eps_high": c.eps_high, "is_cap": c.is_cap}
            denom = getattr(minibatch, denom_name)
            value, stats = objective(*policies, micro.adv, micro.mask, denom=denom, **trust)

        # FSDP averages gradients over ranks. denom counts the responses of all ranks already, so
        # undo the average.
        (value * acc.num_processes).backward()
        minibatch.loss += float(value.detach())
        minibatch.measured.append(measure(micro, logp.detach(), entropy, stats))

    if minibatch.responses:  # else every response was dropped, on every rank: no gradient
        step_optimizer(model, optimizer, minibatch, c, acc)


def step_optimizer(model, optimizer, minibatch: MiniBatch, c: Config, acc: Accelerator) -> None:
    """Clips the gradient and takes AdamW's step, unless loss or gradient is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.max_grad_norm)
    minibatch.grad_norm = float(norm.full_tensor())
    total = acc.reduce(torch.tensor([minibatch.loss], device=acc.device))  # the sum over ranks
    if not math.isfinite(float(total)):
        minibatch.skipped = "loss"
    elif not math.isfinite(minibatch.grad_norm):
        minibatch.skipped = "gradient"
    else:
        if c.offload_optimizer:
            move_moments(optimizer, acc.device)
        optimizer.step()
        if c.offload_optimizer:
            move_moments(optimizer, "cpu")
    optimizer.zero_grad()


def move_moments(optimizer, device) -> None:
    """Adam's moments to a device; not its counters of steps, which are single numbers."""
    for state in optimizer.state.values():
        for moment in checkpoint.MOMENTS:
            state[moment] = state[moment].to(device)


# --- what is measured; launch/results/README.md says what each number means


def measure(micro: rollout.MicroBatch, logp: Tensor, entropy: Tensor, stats: loss.Stats) -> dict:
    """One micro-batch's part of a step's metrics, in forms that add up."""
    stats = stats | loss.discrepancy_stats(micro.logp_old, micro.logp_rollout, entropy, micro.mask)
    gaps = loss.first_order_gap(logp, micro.logp_rollout, micro.mask)
    experts_mu = micro.experts_mu
    if experts_mu is None:
        experts_mu = torch.full_like(micro.experts_old, -1)  # nothing to compare with
    predicting = F.pad(micro.mask[:, 1:], (0, 1))  # the inputs that predict a response token
    return {
        "stats": {name: value.cpu() for name, value in stats.items()},
        "gaps": gaps[micro.mask.any(1)].tolist(),
        "agreement": replay.agreement_counts(experts_mu, micro.experts_old, predicting),
    }


def summarize(
    batch: rollout.Rollout, minibatches: list[MiniBatch], dropped: int, c: Config
) -> dict:
    """The step's metrics, over all mini-batches and ranks."""
    lengths = [len(logp) for logp in batch.logp_rollout]
    tokens = [len(row) for row in batch.tokens]
    columns = [batch.group_ids, batch.rewards, batch.adv, batch.truncated, lengths, tokens]
    ours = {"columns": np.array(columns, float), "dropped": dropped}
    ours["losses"] = [minibatch.loss for minibatch in minibatches]
    ours["measured"] = sum((minibatch.measured for minibatch in minibatches), [])
    by_rank = gather_object([ours])

    everyone = np.concatenate([rank["columns"] for rank in by_rank], axis=1)
    group, rewards, adv, truncated, lengths, tokens = everyone
    measured = sum((rank["measured"] for rank in by_rank), [])
    stats = loss.merge_stats([micro["stats"] for micro in measured])
    gaps = sum((micro["gaps"] for micro in measured), [])
    norms = [minibatch.grad_norm for minibatch in minibatches]
    counts = {}
    for name in ("same", "known", "flipped", "tokens"):
        counts[name] = sum(micro["agreement"][name] for micro in measured)

    row = {"reward_mean": rewards.mean(), "reward_std": rewards.std()}
    row |= {"length_mean": lengths.mean(), "truncated_frac": truncated.mean()}
    row["zero_adv_group_frac"] = 1 - len(set(group[adv != 0])) / len(set(group))
    row["dropped_responses"] = sum(rank["dropped"] for rank in by_rank)
    row["skipped_updates"] = sum(bool(m.skipped) for m in minibatches)
    row |= {name: float(value) for name, value in stats.items() if name != "tokens"}
    row |= {"first_order_gap": float(np.median(gaps)), "first_order_gap_max": max(gaps)}
    row["routing_agreement"] = (counts["same"] / counts["known"]).tolist()
    row["routing_flip_frac"] = float(counts["flipped"] / counts["tokens"])
    row["grad_norm"] = float(np.nanmean(norms)) if np.isfinite(norms).any() else math.nan
    row["loss"] = sum(sum(rank["losses"]) for rank in by_rank) / c.minibatches
    row["lr"] = math.nan if minibatches[-1].skipped else c.lr
    return row | {"rollout_tokens": int(lengths.sum()), "train_tokens": int(tokens.sum())}


def main() -> None:
    try:
        c = Config.from_flags()
        config, data, held_out, folder = prepare(c)
    except ValueError as error:
        flags.fail(error)
    if checkpoint.finished(Path(c.out), folder, c.steps):
        print(f"{c.out}: has run its --steps {c.steps} already")
        return

    code = 1
    try:
        acc = start(c)
        code = train(c, acc, config, data, held_out, folder)
        acc.wait_for_everyone()
        acc.end_training()  # trackers, process group
    except KeyboardInterrupt:  # before the first step: nothing is lost
        code = 130
    except log.Stopped as error:
        print(f"train.py: stopped: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()

    if code:
        saved = checkpoint.saved(Path(c.out))
        where = f"--resume auto goes on from {saved[-1]}" if saved else "no checkpoint yet"
        print(f"train.py: {where}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit now and then aborts in gloo's threads


if __name__ == "__main__":
    main()
