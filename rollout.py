r"""mu, the policy that samples: the vLLM engine inside the trainer's process, and its record.

The life of a step; in brackets what the accelerator holds beside the training states (sharded
master weights and Adam moments, which stay). On a CPU the same calls move no memory.

    sync      theta -> theta_old: tensors stream into vLLM layer by layer, then the KV cache, full
              of old prefixes, is mapped and emptied [engine weights, one or two layers in flight]
    generate  G responses y ~ mu_old to each of P prompts, with log mu_old(y_t) and the experts
              e_mu [engine weights, KV cache]
    sleep     level 2: weights and KV cache are dropped, not kept on the host [CUDA graphs, buffers]
    train     pi_old, then N updates of pi [CUDA graphs, buffers, gradients, activations]
    wake      by the next sync: maps the weights' memory, content undefined [engine weights]

mu is not pi_old although the weights are equal: other kernels, perhaps another precision, other
batch shapes, other experts. So a `Rollout` holds what the engine says it did: the log-probs after
temperature and top_p, and its experts. What it did not say stays NaN or None. Nothing is filled in.

Letters: P prompts, G responses per prompt, B = P * G sequences, T tokens of prompt + response
(P_b + R_b in row b), L layers (dense ones included), E experts, K experts per token.

Left out: rewards between turns, tools, LoRA; engines in other processes or on other GPUs; sampling
while training; expert parallelism. fp8 without CUDA, and int4 anywhere, are emulated: weights are
rounded as they are sent, activations are not.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm


@dataclass(frozen=True, eq=False)
class Rollout:
    """What travels from sampling to update: B = P * G responses; ragged lists, smallest dtypes."""

    tokens: list[np.ndarray]  # B x (P_b + R_b,) int32; EOS is there only if the model emitted it
    prompt_lens: np.ndarray  # (B,) int32, P_b
    logp_rollout: list[np.ndarray]  # B x (R_b,) float32, log mu_old(y_t), NaN where unknown
    routes: list  # B x (P_b + R_b - 1, L, K), vLLM's own record, or None
    truncated: np.ndarray  # (B,) bool, ended by the length limit
    group_ids: np.ndarray  # (B,) int32, index of the prompt in the batch, never its text
    texts: list[str]  # B responses, special tokens skipped
    # Set later, by train.py:
    rewards: np.ndarray | None = None  # (B,) float32, R
    adv: np.ndarray | None = None  # (B,) float32, A
    experts_mu: list | None = None  # B x (P_b + R_b, L, K) int16: routes laid on positions

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Sequence[int]) -> "Rollout":
        """The same record for these rows only, in this order. Group ids stay as they were."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = [value[row] for row in rows]
            elif value is not None:
                value = value[np.array(rows, int)]
            values[field.name] = value
        return Rollout(**values)

    def cut(self, rows: Sequence[int], limit: int) -> list[list[int]]:
        """Rows, longest first, cut into pieces of up to `limit` tokens (or of one row)."""
        pieces = []
        used = 0
        for row in sorted(rows, key=lambda b: -len(self.tokens[b])):
            length = len(self.tokens[row])
            if not pieces or used + length > limit:
                pieces.append([])
                used = 0
            pieces[-1].append(row)
            used += length
        return pieces

    def pad(self, rows: Sequence[int]) -> "MicroBatch":
        """These rows, padded to the longest, on the host; needs `adv`."""
        tokens, mask, logp = [], [], []
        for b in rows:
            prompt_len = int(self.prompt_lens[b])
            tokens.append(torch.from_numpy(self.tokens[b]).long())
            mask.append(torch.arange(len(self.tokens[b])) >= prompt_len)
            logp.append(torch.from_numpy(np.pad(self.logp_rollout[b], (prompt_len, 0))))
        experts = [self.experts_mu[b] for b in rows] if self.experts_mu else None

        padded = partial(pad_sequence, batch_first=True)
        return MicroBatch(
            tokens=padded(tokens),
            lengths=torch.tensor([len(row) for row in tokens]),
            mask=padded(mask),
            logp_rollout=padded(logp),
            adv=torch.from_numpy(self.adv[rows]),
            experts_mu=padded(experts, padding_value=-1) if experts else None,
        )


@dataclass
class MicroBatch:
    """B responses that pass through the model together. Index t holds the quantity of token t.

    On the host until their turn comes: the experts of a whole step are gigabytes.
    """

    tokens: torch.Tensor  # (B, T) int64, prompt + response
    lengths: torch.Tensor  # (B,) int64, on the host wherever the others are
    mask: torch.Tensor  # (B, T) bool, true on response tokens
    logp_rollout: torch.Tensor  # (B, T) fp32, log mu_old, 0 off the mask
    adv: torch.Tensor  # (B,) fp32
    # (B, T, L, K) int16, the experts of inputs: those at t shape the log-prob of t + 1.
    experts_mu: torch.Tensor | None = None  # e_mu, if it is recorded
    # What theta_old says, once it is known:
    logp_old: torch.Tensor | None = None  # (B, T) fp32, log pi_old
    experts_old: torch.Tensor | None = None  # e_pi_old; R2 replays it, metrics compare it to e_mu

    @classmethod
    def empty(cls) -> "MicroBatch":
        """One token and no response, for a rank that joins the others' pass without a row."""
        zero = torch.zeros(1, 1)
        return cls(zero.long(), torch.ones(1, dtype=torch.long), zero.bool(), zero, zero[0])

    def to(self, device: torch.device) -> "MicroBatch":
        moved = {}
        for name, value in vars(self).items():
            if value is not None and name != "lengths":
                moved[name] = value.to(device)
        return replace(self, **moved)


def round_fp8(weight: torch.Tensor) -> torch.Tensor:
    """(rows, cols) through float8 e4m3 with one scale per 128 x 128 block, as fp8_per_block."""
    rows, cols = weight.shape
    padded = F.pad(weight.float(), (0, -cols % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448  # e4m3's largest number
    blocks = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return blocks.view_as(padded)[:rows, :cols].to(weight.dtype)


def round_int4(weight: torch.Tensor) -> torch.Tensor:
    """(rows, cols) to the integers -7..7 times one scale per output channel (row)."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


def start_vllm(model_dir: str | Path, **arguments):
    """LLM(...), with two of its side effects undone: on a CPU it turns torch.set_num_threads into a
    no-op and overwrites LOCAL_WORLD_SIZE. A third, reseeding all random generators, is not."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # sync hands over a generator as it is
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # DeepGEMM compiles with nvcc where it finds one, for minutes, fails where it does not, and
    # rounds the scales of fp8 weights once more. The kernel that comes next is compiled already.
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # read against vLLM 0.30.0
    set_num_threads = torch.set_num_threads
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(f"vLLM is not usable ({error}); see requirements.txt") from None
    llm = LLM(str(model_dir), **arguments)  # read against vLLM 0.30.0
    torch.set_num_threads = set_num_threads
    os.environ["LOCAL_WORLD_SIZE"] = ranks_here

    # The CPU backend names the memory that ranks share alike in every run. By now all ranks have
    # joined it. Without the name it ends with the process and is in nobody's way.
    if arguments["tensor_parallel_size"] > 1:
        for segment in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):  # read against vLLM 0.30.0
            segment.unlink(missing_ok=True)
    return llm


def device_arguments(dtype: str, max_model_len: int, gpu_memory: float, kv_cache_gb: float) -> dict:
    """The arguments of LLM() that differ between CUDA and CPU. Read against vLLM 0.30.0."""
    if not torch.cuda.is_available():
        # A seeded request whose prompt is cut into chunks crashes on a CPU ("CPU Generator does
        # not use offset"). Without chunking the token budget must hold the longest sequence.
        arguments = {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32}
        arguments["max_num_batched_tokens"] = max(max_model_len, 8192)
        return arguments | {"kv_cache_memory_bytes": int(kv_cache_gb * 2**30)}
    arguments = {"enable_sleep_mode": True, "gpu_memory_utilization": gpu_memory}
    # Other backends rebuild their kernels on a reload and lose CUDA graphs or the route capture.
    arguments |= {"moe_backend": "triton", "max_num_batched_tokens": 16384}
    if dtype == "fp8":  # the router stays bf16; activations are scaled per token, not per batch
        arguments["quantization"] = "fp8_per_block"
        arguments["quantization_config"] = {"ignore": ["*.mlp.gate"]}
    return arguments


def small_cache(shapes: dict, width: int, tokens: int, most: int = 2**32) -> int | None:
    """Bytes of a KV cache for `tokens` tokens, each number `width` bytes, if that is below `most`.

    Else None: then vLLM takes what its share of the GPU leaves. For a tiny model that would be
    millions of blocks, each a Python object, and every sync and sleep walks them all.
    """
    rows = sum(shape[0] for name, shape in shapes.items() if name.endswith("k_proj.weight"))
    need = 2 * rows * width * tokens  # keys and values
    return need if need < most else None


def forget_packed(model: torch.nn.Module) -> None:
    """Before a reload on a CPU, which otherwise leaves log-probs nats off, in silence: vLLM packs
    expert weights when it makes their kernel, and while that exists later weights land unpacked in
    its buffer; it packs a tied lm_head once and for all. Read against vLLM 0.30.0."""
    for module in model.modules():
        if type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel = None
        elif type(module).__name__ == "ParallelLMHead":
            module.cpu_linear = F.linear  # on the live weight


class Engine:
    """The colocated vLLM engine: sync -> generate -> sleep -> (train) -> wake -> sync.

    `shapes` has the name and shape of each tensor that a sync sends: all that the model folder has.
    `dtype` is bf16, fp32, fp8 or int4. `gpu_memory` is the share of a GPU for weights and KV cache,
    free when this starts, so before the training states; `kv_cache_gb` counts on a CPU only.
    Without `routes` it records no experts (a dense model has none). Without `load` it does not read
    the folder's weights, which the first sync sends anyway. `progress` shows a bar while it
    samples. What else is given goes to vLLM's LLM() as it is.

    Under torchrun it needs a process group, and tensor-parallel ranks make the same calls with the
    same prompts and seeds. Raises ValueError for a setting that cannot work.
    """

    def __init__(
        self,
        model_dir: str | Path,
        shapes: dict[str, tuple[int, ...]],
        *,
        dtype: str = "bf16",
        max_model_len: int,
        max_num_seqs: int = 256,
        tensor_parallel: int = 1,
        gpu_memory: float = 0.6,
        kv_cache_gb: float = 1.0,
        seed: int = 0,
        routes: bool = True,
        progress: bool = False,
        load: bool = True,
        **vllm,
    ):
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        if dtype not in ("bf16", "fp32", "fp8", "int4"):
            raise ValueError(f"rollout dtype {dtype!r} is none of bf16, fp32, fp8, int4")
        if world_size % tensor_parallel:
            raise ValueError(f"rollout tp {tensor_parallel} does not divide {world_size} ranks")
        if world_size > 1 and not torch.distributed.is_initialized():
            raise ValueError("several ranks: call torch.distributed.init_process_group() first")

        self.shapes = shapes
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.progress = progress
        self.dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        self.rounding = {"fp8": None if cuda else round_fp8, "int4": round_int4}.get(dtype)
        self.asleep = False
        self.broken = None  # why nothing works any more
        self.stale = None  # why generate() must wait for a sync
        if self.rounding:
            self.stale = f"{dtype} is emulated by sync(): sync first"
        if not load:
            self.stale = "the engine has no weights yet: sync first"

        arguments = device_arguments(dtype, max_model_len, gpu_memory, kv_cache_gb)
        tokens = max_num_seqs * (max_model_len + 16) // tensor_parallel  # 16: a spare block each
        cache = small_cache(shapes, self.dtype.itemsize, tokens)
        if cuda and cache:
            arguments["kv_cache_memory_bytes"] = cache
        self.llm = start_vllm(
            model_dir,
            dtype=self.dtype,
            load_format="auto" if load else "dummy",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            tensor_parallel_size=tensor_parallel,
            # torchrun's own processes are the workers; one engine a tensor-parallel group.
            distributed_executor_backend="external_launcher" if world_size > 1 else None,
            seed=seed,
            enable_prefix_caching=True,
            enable_return_routed_experts=routes,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled
            generation_config="vllm",  # the folder's EOS ids still stop, its temperature is ignored
            use_tqdm_on_load=False,
            **arguments | vllm,
        )
        self.tokenizer = self.llm.get_tokenizer()
        inner = self.llm.llm_engine
        self.scheduler = inner.engine_core.engine_core.scheduler  # read against vLLM 0.30.0
        blocks = inner.vllm_config.cache_config  # read against vLLM 0.30.0
        self.cache_tokens = blocks.num_gpu_blocks * blocks.block_size

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int]:
        """theta -> theta_old: streams (HF name, full tensor) pairs in; returns (bytes, tensors).

        Names and shapes must be exactly those of the model folder (vLLM skips a missing tensor in
        silence), else RuntimeError. Part of the weights are new by then: the engine stops for good.
        """
        if self.broken:
            raise RuntimeError(self.broken)
        if self.asleep:
            self.wake()
        self.broken = "a weight sync stopped half-way: start a new engine (restart the run)"
        if not torch.cuda.is_available():
            self.llm.apply_model(forget_packed)  # read against vLLM 0.30.0
        sent = []
        arguments = {"weights_iterator": self._checked(weights, sent)}
        # The one reload that repeats what loading did: fusing, packing, quantizing.
        self.llm.collective_rpc("reload_weights", kwargs=arguments)  # read against vLLM 0.30.0
        if self.asleep:  # only now, when the tensors in flight are gone
            self.llm.wake_up(["kv_cache"])  # read against vLLM 0.30.0
            self.asleep = False
        # Cached blocks are the old weights'; False means that requests were running.
        emptied = self.llm.reset_prefix_cache()  # read against vLLM 0.30.0
        assert emptied is True, f"prefix cache not emptied: reset_prefix_cache() gave {emptied}"
        self.broken = self.stale = None
        return sum(sent), len(sent)

    def _checked(self, weights: Iterable, sent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Casts, rounds, passes on. Raises at the first tensor that is not the folder's."""
        missing = dict(self.shapes)
        for name, tensor in weights:
            if name not in missing:
                why = "was sent twice" if name in self.shapes else "is not in the model folder"
                raise RuntimeError(f"weight sync: {name} {why}")
            shape = tuple(tensor.shape)
            stored = missing.pop(name)
            if shape != stored:
                raise RuntimeError(f"weight sync: {name} has shape {shape}, not {stored}")
            # Always a copy: vLLM keeps the tensors of a layer until the layer is complete.
            tensor = tensor.detach().to(self.dtype, copy=True)
            # Linear layers and experts, but not the router, embedding, head and norms.
            if self.rounding and name.endswith("_proj.weight"):
                tensor = self.rounding(tensor)
            sent.append(tensor.nbytes)
            yield name, tensor
        if missing:
            raise RuntimeError(f"weight sync: {len(missing)} tensors not sent: {list(missing)[:3]}")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        seed: int | Sequence[int],
        first_prompt: int = 0,
    ) -> Rollout:
        """G responses to each of P prompts (token ids). Equal weights and arguments, equal tokens.

        `seed` may be a tuple (run, step). Engines that share a batch take the same seed, and each
        its `first_prompt`, where seeds and group ids begin to count. ValueError where a prompt and
        max_new_tokens exceed max_model_len, RuntimeError without usable weights.
        """
        if self.broken or self.stale:
            raise RuntimeError(self.broken or self.stale)
        longest = max(map(len, prompts), default=0) + max_new_tokens
        if longest > self.max_model_len:
            raise ValueError(f"prompt + response may be {longest} long, not {self.max_model_len}")
        from vllm import SamplingParams

        # vLLM gives response g of a prompt the seed + g, so prompts are spaced by G. The hash keeps
        # calls apart; 32 bits, since a CPU generator ignores the higher ones.
        first_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        ids = range(first_prompt, first_prompt + len(prompts))
        settings = {"n": group_size, "temperature": temperature, "top_p": top_p}
        settings |= {"max_tokens": max_new_tokens, "detokenize": False}
        settings |= {"logprobs": 0, "flat_logprobs": True}  # the sampled tokens' alone
        params = [SamplingParams(**settings, seed=first_seed + i * group_size) for i in ids]

        # vLLM admits a request if its prompt fits now. When the cache is full, it drops requests
        # and computes them again. So admit no more at once than the cache holds with a quarter of
        # the longest response each.
        fit = self.cache_tokens // (longest - max_new_tokens + max_new_tokens // 4)
        self.scheduler.max_num_running_reqs = min(self.max_num_seqs, max(fit, 1))
        bar = self.progress and partial(tqdm, leave=False)
        batch = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(batch, params, use_tqdm=bar)  # read against vLLM 0.30.0

        rows = [(output.prompt_token_ids, a) for output in outputs for a in output.outputs]
        assert len(rows) == len(ids) * group_size, f"{len(rows)} responses to {len(ids)} prompts"
        return Rollout(
            tokens=[np.array([*prompt, *a.token_ids], np.int32) for prompt, a in rows],  # x, y
            prompt_lens=np.array([len(prompt) for prompt, _ in rows], np.int32),
            logp_rollout=[sampled_logp(a) for _, a in rows],  # log mu_old
            routes=[a.routed_experts for _, a in rows],  # e_mu, as vLLM records it
            truncated=np.array([a.finish_reason == "length" for _, a in rows], bool),
            group_ids=np.repeat(np.array(ids, np.int32), group_size),
            texts=[self.tokenizer.decode(a.token_ids, skip_special_tokens=True) for _, a in rows],
        )

    def sleep(self) -> None:
        """Drops weights and KV cache (level 2) to make room for training."""
        self.llm.sleep(level=2)  # read against vLLM 0.30.0
        # Block ids kept for the routes; with asynchronous scheduling each request leaves some.
        getattr(self.scheduler, "_re_block_ids", {}).clear()  # read against vLLM 0.30.0
        self.asleep = True
        self.stale = "sleep() dropped the engine's weights: sync first"

    def wake(self) -> None:
        """Maps the weights' memory, which torch's cache gives back first. sync() does the rest."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.llm.wake_up(["weights"])  # read against vLLM 0.30.0

    def close(self) -> None:
        """Ends the engine; torch.distributed's process group is left to the trainer."""
        if not (self.asleep and torch.cuda.is_available()):  # it would free unmapped memory
            self.llm.llm_engine.model_executor.shutdown()  # read against vLLM 0.30.0
        self.llm = self.scheduler = None
        self.broken = "the engine is closed"


def sampled_logp(answer) -> np.ndarray:
    """(R,) float32 log-probs of the sampled tokens, NaN where vLLM gave None, NaN or -inf."""
    flat = answer.logprobs
    logp = np.array(flat.logprobs if flat else [None] * len(answer.token_ids), np.float32)
    return np.where(np.isfinite(logp), logp, np.float32(np.nan))
