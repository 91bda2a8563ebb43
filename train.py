"""The loop: MiniRL (arXiv 2512.01374) on a Qwen3-MoE, or a dense Qwen3, with a vLLM engine in the same process.

    each step   sync      theta -> theta_old: the weights stream into vLLM                Engine.sync
                sample    G responses to each of P prompts, log mu_old, experts e_mu      sample
                score     R(x, y); then the engine sleeps                                 sample
                adv       A = R - mean of the group                                       group_advantages
                old       log pi_old and e_pi_old, unless pi still is pi_old              old_logprobs
                update    N times: log pi under replayed experts, MiniRL, clip, AdamW     update
                log       evaluate if due; a line, metrics.jsonl, samples.jsonl           report
                save      a checkpoint, if due or a signal asks for it                    checkpoint

One rank or many, it is the same path: Accelerate's FSDP2 shards each decoder layer; masters and Adam moments are fp32,
compute is --precision. Each group of --rollout-tp ranks runs one engine, samples its share of the prompts and trains
on what it sampled. Data order and sampling follow from (seed, step) alone, and weights and moments are all that a step
hands to the next, so a resumed run goes on as if never stopped: bit for bit on CPUs; on CUDA, whose backward kernels
add in no fixed order, to rounding (guard.Watch alone, which stops it, starts anew).

    python train.py --model runs/cold-start --out runs/mine                    # the toy, on a CPU
    python train.py --model runs/cold-start --out runs/mine --resume auto      # go on after a stop
    torchrun --standalone --nproc-per-node 2 train.py --model runs/cold-start --out runs/two
"""

import ctypes
import dataclasses
import importlib.util
import inspect
import math
import os
import random
import sys
import time
import traceback
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # threads that spin for long stall shared cores
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning a rank about NUMA binding

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, fsdp2_prepare_model, gather_object, set_seed
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from tqdm import tqdm

import loss
import moe
import replay
import rollout
from launch import checkpoint, evaluate, flags, guard, handover, models, report, rewards
from launch import data as dataset

DESCRIPTION = (
    f"{__doc__.splitlines()[0]} Under torchrun, with several ranks, it is the same command."
)


@dataclass
class Config:
    """Every flag of train.py; the comment behind a field is its --help. A test allows 46: a fork may raise that."""

    model: str = "runs/cold-start"  # folder of a Qwen3-MoE or Qwen3 checkpoint, or its hub name
    data: str = "addition"  # JSONL files (commas), hf:NAME[:SPLIT], or the task addition
    eval_data: str = ""  # the same for evaluation; empty: none
    prompt_template: str = ""  # text with {prompt} in it; empty: the model's chat template, if any
    reward: str = "auto"  # file.py:function; auto: math-verify, or the rule of the task addition
    reward_errors: Literal["stop", "zero"] = "stop"  # where that function fails: stop, or count 0
    out: str = "runs/run"  # folder of everything the run leaves
    resume: str = ""  # "auto": from the newest checkpoint in --out, if any; or from a folder
    seed: int = 0  # of data order, sampling and evaluation
    steps: int = 100  # rollout batches to train on
    prompts_per_step: int = 32  # P, prompts in a rollout batch, over all ranks
    group_size: int = 8  # G, responses to each prompt
    max_new_tokens: int = 64  # longest response, in tokens
    temperature: float = 1.0  # of sampling, and of the log-probs on both sides
    rollout_dtype: Literal["auto", "bf16", "fp32", "fp8", "int4"] = "auto"  # auto: --precision
    rollout_tp: int = 1  # ranks that share one vLLM engine (tensor parallel)
    rollout_memory: float = 0.6  # share of each GPU's memory for vLLM while it is awake
    objective: Literal["minirl", "grpo", "cispo"] = "minirl"  # loss.py
    minibatches: int = 1  # N, gradient updates per rollout batch; 1 is on-policy
    is_correction: bool = True  # weight pi/mu; without it pi/pi_old, ignoring the engines' gap
    is_cap: float = 5.0  # largest importance weight of a token
    clip: bool = True  # mask tokens that training has moved out of the trust region
    eps_low: float = 0.2  # trust region of pi/pi_old below 1, for negative advantages
    eps_high: float = 0.27  # and above 1, for positive ones
    length_norm: bool = False  # divide each response's sum by its length (an ablation)
    replay: Literal["none", "R2", "R3"] = "none"  # pi_old's experts in pi, or vLLM's in both
    record_routes: bool = True  # vLLM's, for routing_agreement; without, only where R3 needs them
    lr: float = 5e-5  # of AdamW, constant; for a 30B model 1e-6 is usual
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm
    max_bad_steps: int = 3  # in a row with a loss or gradient that is not finite; then it stops
    precision: Literal["bf16", "fp32"] = "bf16"  # of compute; masters and moments are fp32
    micro_batch_tokens: int = 16384  # tokens in one forward and backward pass
    activation_checkpointing: bool = False  # recompute layers in backward to save memory
    offload_optimizer: bool = False  # Adam's moments on the host but for the optimizer's step
    hsdp_replicas: int = 1  # copies of the sharded model, such as one per node
    eval_every: int = 0  # steps between evaluations (0: one at the end)
    eval_samples: int = 4  # k, responses to each problem of --eval-data
    eval_temperature: float = 0.0  # of evaluation; 0: as training (0.01 is nearly greedy)
    eval_top_p: float = 1.0  # probability mass that evaluation samples from
    eval_max_new_tokens: int = 0  # longest response in evaluation; 0: as training
    eval_only: bool = False  # evaluate --model, or the checkpoint --resume, and stop
    save_rollouts: str = ""  # folder to keep what is sampled; empty: none
    load_rollouts: str = ""  # such a folder, to train on without an engine or data
    save_every: int = 50  # steps between checkpoints (0: one at the end)
    keep: int = 2  # newest checkpoints that stay on disk
    log_with: Literal["none", "tensorboard", "wandb"] = "none"  # Accelerate tracker besides files

    @property
    def engine_dtype(self) -> str:
        return self.precision if self.rollout_dtype == "auto" else self.rollout_dtype

    @classmethod
    def from_flags(cls, argv: list[str] | None = None) -> "Config":
        return flags.parse(cls, argv, DESCRIPTION)


# --- the loop


def train(c: Config, acc, config: moe.MoEConfig, data: list, held_out: list, folder) -> int:
    """One run, from the checkpoint `folder` if there is one -> exit code: 0, or 128 + the signal that asked to stop."""
    own = c.eval_only and not folder  # the engine then reads the weights itself
    engine = make_engine(c, config, acc, data + held_out, load=own)  # first: it measures memory
    model = optimizer = None
    if engine.stale or not own:
        model, optimizer = make_model(c, config, acc)
    begin = checkpoint.resume(model, optimizer, folder, c, acc)
    if c.eval_only:
        evaluation(engine, model, held_out, begin, c, acc)
        engine.close()
        return 0
    report.announce(model, c, acc)
    signals, watch, seconds = guard.Signals(), guard.Watch(c.max_bad_steps), defaultdict(float)
    quiet = None if acc.is_main_process else True  # None: no bar where there is no terminal
    bar = tqdm(range(begin, c.steps), initial=begin, total=c.steps, disable=quiet)
    for step in bar:
        set_seed((c.seed + step) % 2**32)  # nothing here draws from it; a fork may
        examples = engine.examples(step) if c.load_rollouts else pick(data, step, c)
        with phase(seconds, "sync"):
            engine.sync(moe.hf_weights(model, engine.dtype))  # theta -> theta_old
        with phase(seconds, "rollout"):
            batch = sample(engine, examples, c.group_size, c, acc, (c.seed, step))  # y ~ mu_old, R
            engine.sleep()
            handover.save(step, batch, examples, c, acc)
            acc.wait_for_everyone()  # the slowest engine's time is everyone's
        batch, experts, dropped = usable(batch, config, c, acc)
        adv = advantages(batch, c)
        minibatches = split(batch, experts, adv, c, acc)
        with phase(seconds, "old"):
            old_logprobs(model, minibatches[1:], c, acc)  # in the first one pi is pi_old
        with phase(seconds, "update"):
            for minibatch in minibatches:
                update(model, optimizer, minibatch, c, acc)
        if held_out and due(c.eval_every, step, c):
            with phase(seconds, "eval"):
                evaluation(engine, model, held_out, step + 1, c, acc)
        row = report.write_step(
            step, examples, batch, adv, minibatches, dropped, seconds, c, acc, bar
        )
        seconds.clear()
        del experts, minibatches  # or they would stay through the next rollout
        watch.check(row)
        asked = signals.asked()
        if asked or due(c.save_every, step, c):
            with phase(seconds, "save"):  # counted in the next step's line
                checkpoint.save(step + 1, model, optimizer, c, acc)
        if asked:
            return 128 + asked
    checkpoint.export(model, c, acc)
    engine.close()
    return 0


def evaluation(engine, model, held_out: list, step: int, c: Config, acc: Accelerator) -> None:
    """k responses to each problem, always the same random numbers; without a model, by the engine as it is."""
    if model:
        engine.sync(moe.hf_weights(model, engine.dtype))
    answers = sample(
        engine, held_out, c.eval_samples, c, acc, (c.seed, 2**31), evaluate.sampling(c)
    )
    engine.sleep()
    evaluate.write(step, answers, held_out, c, acc)


def due(every: int, step: int, c: Config) -> bool:
    return step + 1 == c.steps or (every > 0 and (step + 1) % every == 0)


@contextmanager
def phase(seconds: dict[str, float], name: str):
    begin = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[name] += time.perf_counter() - begin


# --- before the first step


def prepare(c: Config) -> tuple[moe.MoEConfig, list[dict], list[dict], Path | None]:
    """What a run starts from; c.model becomes a folder, if it was a name. All that can be wrong with flags and files
    shows here, before an engine starts."""
    flags.check(c, *(int(os.environ.get(f"{on}WORLD_SIZE", 1)) for on in ("", "LOCAL_")))
    if not c.load_rollouts and not importlib.util.find_spec("vllm"):
        raise ValueError("vLLM is not installed; launch/setup.sh installs it")
    config = models.open_model(c)
    rewards.find(c.reward)
    data, held_out = dataset.prepare(c, config.max_position_embeddings)
    shapes = {name: p.shape for name, p in moe.meta_parameters(config).items()}
    folder = checkpoint.open_folder(Path(c.out), c.resume, shapes, c.eval_only)
    handover.check(c, config, folder)
    return config, data, held_out, folder


def keep_pages() -> None:
    """Has glibc reuse freed blocks of up to 256 MB, not map each anew: page faults cost a CPU much of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(-3, 2**28)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def start(c: Config) -> Accelerator:
    """Process group and Accelerator: FSDP2 on one rank as on many, on CUDA (NCCL) and on CPUs (gloo)."""
    cuda = torch.cuda.is_available()
    keep_pages()
    if "RANK" not in os.environ:  # not under torchrun: a world of one rank, which needs no port
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    PartialState(cpu=not cuda, timeout=timedelta(hours=2))  # the wait for the slowest engine
    # Without several GPUs, Accelerate 1.15 ignores an FSDP plugin and says nothing.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    compute = {"bf16": torch.bfloat16, "fp32": torch.float32}[c.precision]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False,  # it reads everything on rank 0; moe.load_weights does not
        mixed_precision_policy=MixedPrecisionPolicy(compute, reduce_dtype=torch.float32),
    )
    shards = dist.get_world_size() // c.hsdp_replicas
    layout = ParallelismConfig(dp_replicate_size=c.hsdp_replicas, dp_shard_size=shards)
    return Accelerator(
        cpu=not cuda,
        fsdp_plugin=plugin,
        parallelism_config=layout if c.hsdp_replicas > 1 else None,
        log_with=None if c.log_with == "none" else c.log_with,
        project_dir=c.out,
    )


def make_engine(c: Config, config: moe.MoEConfig, acc: Accelerator, data: list[dict], load=False):
    """One engine for each --rollout-tp ranks, which takes up to 256 sequences at once."""
    if c.load_rollouts:
        return handover.Recorded(c.load_rollouts)
    prompts = -(-c.prompts_per_step * c.rollout_tp // acc.num_processes)
    engine = rollout.Engine(
        c.model,
        dtype=c.engine_dtype,
        max_model_len=min(dataset.longest(data, c), config.max_position_embeddings),
        max_num_seqs=min(256, prompts * c.group_size),
        tensor_parallel=c.rollout_tp,
        gpu_memory=c.rollout_memory,
        seed=c.seed,
        routes=models.records_routes(c, config),
        progress=acc.is_main_process and sys.stderr.isatty(),
        load=load,
    )
    if acc.device.type == "cuda":  # packed micro-batches vary in size; only now, for in such memory
        # the CUDA graphs of ranks that share an engine cannot reach each other's buffers.
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
    """Model and AdamW."""
    model = load_model(c, config, acc)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, weight_decay=0.0, fused=True)
    for p in model.parameters():
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        moments = {k: m.cpu() for k, m in moments.items()} if c.offload_optimizer else moments
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return model, optimizer


# --- sampling


def pick(data: list[dict], step: int, c: Config) -> list[dict]:
    """The P examples of a step: epochs shuffled by the seed, read one after the other."""
    places = range(step * c.prompts_per_step, (step + 1) * c.prompts_per_step)
    return [data[shuffled(len(data), c.seed, i // len(data))[i % len(data)]] for i in places]


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(n), n)


def sample(engine, examples: list[dict], k: int, c: Config, acc, seed, sampling=None):
    """This engine's share of the examples, answered k times and rewarded; ids and seeds count over all engines."""
    engines, this = acc.num_processes // c.rollout_tp, acc.process_index // c.rollout_tp
    first, end = (len(examples) * i // engines for i in (this, this + 1))
    prompts = [e["tokens"] for e in examples[first:end]]
    sampling = sampling or {"max_new_tokens": c.max_new_tokens, "temperature": c.temperature}
    batch = engine.generate(prompts, k, seed=seed, first_prompt=first, **sampling)
    return batch if batch.rewards is not None else rewards.score(batch, examples, c)


def usable(batch: rollout.Rollout, config: moe.MoEConfig, c: Config, acc: Accelerator):
    """The responses with sound log-probs and routes; of those that this rank trains on, row -> experts e_mu (T, L, K)
    int16, or None where none are recorded; how many were dropped. An engine's ranks share its responses out.

    Raises guard.Stopped when none is sound: then it is a setting and no accident.
    """
    mine = range(acc.process_index % c.rollout_tp, len(batch), c.rollout_tp)
    experts, why = dict.fromkeys(mine), ""
    if models.records_routes(c, config):
        records = [batch.routes[b] for b in mine], [len(batch.tokens[b]) for b in mine]
        found, why = replay.align_and_check(*records, config.num_experts, config.dense_layers)
        experts = {b: e for b, e in zip(mine, found, strict=True) if e is not None}
    sound = [b for b in experts if np.isfinite(batch.logp_rollout[b]).all()]
    if c.rollout_tp > 1:  # each has looked at its own
        engine = acc.process_index // c.rollout_tp * c.rollout_tp
        sound = sorted(sum(gather_object([sound])[engine : engine + c.rollout_tp], []))
    if not sound:
        raise guard.Stopped(f"no response can be trained on: {why or 'log-probs are not finite'}")
    kept = {place: experts[b] for place, b in enumerate(sound) if b in experts}
    return batch.select(sound), kept, len(batch) - len(sound)


def advantages(batch: rollout.Rollout, c: Config) -> Tensor:
    """A of each response, (B,)."""
    R, group_ids = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_ids)
    return loss.group_advantages(R, group_ids, std_norm=loss.OBJECTIVES[c.objective][2])


# --- training


@dataclass
class MiniBatch:
    """One gradient update: this rank's micro-batches, the whole's size over all ranks, and what was measured."""

    micro: list[rollout.MicroBatch]
    responses: int
    tokens: int  # response tokens
    skipped: str = ""  # "loss" or "gradient", if that is not finite
    loss: float = 0.0  # this rank's part
    grad_norm: float = math.nan
    lr: float = math.nan
    measured: list[dict] = dataclasses.field(default_factory=list)  # one for each micro-batch


def split(batch: rollout.Rollout, experts, adv, c: Config, acc: Accelerator) -> list[MiniBatch]:
    """N mini-batches of whole groups, this rank's rows of each cut into micro-batches: the same sets on any number of
    ranks.

    A rank with fewer micro-batches than another gets empty ones, since each pass is a collective.
    """
    minibatches = []
    for n in range(c.minibatches):
        rows = [b for b in experts if batch.group_ids[b] % c.minibatches == n]
        parts = batch.parts(rows, c.micro_batch_tokens)
        mine_n = (len(rows), sum(len(batch.logp_rollout[b]) for b in rows), len(parts))
        responses, tokens, passes = zip(*gather_object([mine_n]), strict=True)  # over ranks
        parts += [[]] * (max(passes) - len(parts))
        micro = [batch.pack(part, experts, adv) for part in parts]
        minibatches.append(MiniBatch(micro, sum(responses), sum(tokens)))
    return minibatches


def logprobs(
    model, micro: rollout.MicroBatch, experts: Tensor | None, c: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """log pi and entropy of response tokens under these experts, two (B, T), 0 elsewhere; the router's own choice.

    The hidden state of t - 1 predicts token t; only those of response tokens pass through the head.
    """
    hidden, chosen = model(micro.tokens, micro.lengths, experts, live=True)
    at = micro.mask[:, 1:]  # (B, T - 1)
    values = model.logprobs(hidden[:, :-1][at], micro.tokens[:, 1:][at], c.temperature)
    blank = torch.zeros(micro.mask.shape, device=hidden.device)
    logp, entropy = (blank.masked_scatter(micro.mask, v) for v in values)
    return logp, entropy, chosen


@torch.no_grad()
def old_logprobs(model, minibatches: list[MiniBatch], c: Config, acc: Accelerator) -> None:
    """log pi_old and e_pi_old of these mini-batches: the weights that sampled, in the training engine."""
    for micro in report.progress([z for m in minibatches for z in m.micro], "old", acc):
        here = micro.to(acc.device)  # a copy; what it finds is kept on the host
        experts = replay.routes_for_pi_old(c.replay, here.experts_rollout)
        logp, _, chosen = logprobs(model, here, experts, c)
        micro.logp_old, micro.experts_old = logp.cpu(), chosen.cpu()


def update(model, optimizer, minibatch: MiniBatch, c: Config, acc: Accelerator) -> None:
    """One gradient update; what it measures stays in the mini-batch.

    In the first mini-batch of a step theta is theta_old: pi is pi_old, and recording it here saves a pass.
    """
    objective, counted, _ = loss.OBJECTIVES[c.objective]
    takes = inspect.signature(objective).parameters
    knobs = {k: v for k, v in vars(c).items() if k in takes}  # flags named as its parameters
    for micro in (m.to(acc.device) for m in report.progress(minibatch.micro, "update", acc)):
        experts = replay.routes_for_pi(c.replay, micro.experts_rollout, micro.experts_old)
        logp, entropy, chosen = logprobs(model, micro, experts, c)
        if micro.logp_old is None:  # the first mini-batch
            micro.logp_old, micro.experts_old = logp.detach(), chosen
        policies = (logp, micro.logp_old, micro.logp_rollout)
        denom = {"responses": minibatch.responses, "tokens": minibatch.tokens}[counted]
        value, stats = objective(*policies, micro.adv, micro.mask, denom=denom, **knobs)
        # FSDP averages gradients over ranks; denom counts all of them already, so undo the average.
        (value * acc.num_processes).backward()
        minibatch.loss += float(value.detach())
        minibatch.measured.append(report.measure(micro, logp.detach(), entropy, stats))
    if not minibatch.responses:  # every response was dropped, on every rank: there is no gradient
        return
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.max_grad_norm)
    minibatch.grad_norm = float(norm.full_tensor())
    whole = acc.reduce(torch.tensor([minibatch.loss], device=acc.device))  # the sum over ranks
    numbers = {"loss": float(whole), "gradient": minibatch.grad_norm}
    minibatch.skipped = next((name for name, x in numbers.items() if not math.isfinite(x)), "")
    if minibatch.skipped:
        optimizer.zero_grad()
        return
    minibatch.lr = c.lr
    if c.offload_optimizer:
        place_moments(optimizer, acc.device)
    optimizer.step()
    optimizer.zero_grad()
    if c.offload_optimizer:
        place_moments(optimizer, "cpu")


def place_moments(optimizer, device) -> None:
    """Adam's moments to a device; not its counters of steps, which are single numbers."""
    for state in optimizer.state.values():
        state |= {name: value.to(device) for name, value in state.items() if value.ndim}


def main() -> None:
    try:
        c = Config.from_flags()
        prepared = prepare(c)
    except ValueError as error:
        flags.fail(error)
    done = checkpoint.finished(Path(c.out), prepared[3], c.steps)
    if done and not c.eval_only:
        return print(f"{c.out}: has run its --steps {c.steps} already")
    code = 1
    try:
        acc = start(c)
        code = train(c, acc, *prepared)
        acc.wait_for_everyone()
        acc.end_training()  # trackers, process group
    except KeyboardInterrupt:  # before the first step: nothing is lost
        code = 130
    except guard.Stopped as error:
        print(f"train.py: stopped: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    if code:
        saved = checkpoint.saved(Path(c.out))
        print(
            f"train.py: --resume auto goes on from {saved[-1]}"
            if saved
            else "train.py: no checkpoint yet",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit now and then aborts in gloo's threads


if __name__ == "__main__":
    main()
