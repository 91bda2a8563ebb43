"""Qwen3-MoE, and dense Qwen3, in plain torch. One seam: a token's experts can be handed in.

A layer is    x = x + Attention(norm(x));    x = x + MoE(norm(x)),    and the MoE of one token is

    p   = softmax(W_r x)                          over all E experts, in fp32
    e   = the K experts with the largest p        or the K experts that were handed in (replay.py)
    MoE = sum_{i in e} g_i * W_down_i (silu(W_gate_i x) * W_up_i x),
    g_i = p_i / sum_{j in e} p_j                  or p_i, if the config has norm_topk_prob off

The choice e is discrete: a rounding error in x can swap an expert, and then the token's probability
jumps. The gates g are smooth. Replay fixes e alone. g always comes from the live p, so the router
keeps its gradient (paper, Sec. 3).

Letters: B sequences, T positions, S tokens of all sequences without padding, D width, H heads,
L layers, E experts, K experts per token, F width of an expert, V vocabulary.

Sequences run packed: padding is dropped first, so it costs nothing and reaches nothing. Attention
sees one sequence at a time, everything else S tokens. One sort by expert makes each expert's tokens
contiguous, and its matrices multiply those only.

Parameters have the names of the checkpoint format. The exception is a layer's experts: two stacked
tensors here, gate_up_proj (E, 2F, D) and down_proj (E, D, F), which the format stores one by one.

Left out: the load-balancing loss (the paper does not use one), KV caches (vLLM samples), and what a
config is refused for: biases, sliding windows, rope scaling, shared experts.
"""

import itertools
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

ARCHITECTURE = "Qwen3MoeForCausalLM"
DENSE = "Qwen3ForCausalLM"
# What config.json may say, if it says anything.
SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
SUPPORTED |= {"rope_type": "default", "shared_expert_intermediate_size": 0}
RECOMPUTE = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here draws numbers
ONE_FILE_BYTES = 5e9  # an export below is a single file
LOGIT_CHUNK = 2**26  # elements of one (tokens, V) block of logits: 256 MB in fp32


@dataclass(frozen=True)
class MoEConfig:
    """The numbers that shape the model. `hf` is their config.json, kept to write it back."""

    vocab_size: int
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # of the dense layers
    moe_intermediate_size: int  # F
    num_experts: int  # E
    num_experts_per_tok: int  # K
    norm_topk_prob: bool
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    max_position_embeddings: int
    hf: dict

    def is_moe(self, layer: int) -> bool:
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in self.mlp_only_layers

    @property
    def dense_layers(self) -> list[int]:
        return [i for i in range(self.num_hidden_layers) if not self.is_moe(i)]

    @property
    def has_experts(self) -> bool:
        """True if the model has MoE layers: then there are routes to record and to replay."""
        return len(self.dense_layers) < self.num_hidden_layers

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> "MoEConfig":
        """Reads config.json as transformers 4 or 5 writes it.

        Raises ValueError, which names the file and the key that is wrong.
        """
        path = Path(model_dir) / "config.json"
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, hf: dict) -> "MoEConfig":
        """`hf` is the content of a config.json. Raises ValueError, which names the key."""
        kinds = hf.get("architectures") or []
        if not {ARCHITECTURE, DENSE} & set(kinds):
            raise ValueError(f"architectures is {kinds}, not {ARCHITECTURE} or {DENSE}")
        found = with_known_names(hf)
        if DENSE in kinds:  # each layer is an MLP
            found |= {"num_experts": 1, "num_experts_per_tok": 1, "decoder_sparse_step": 2**31}
            found |= {"norm_topk_prob": True, "moe_intermediate_size": hf.get("intermediate_size")}

        for key, only in SUPPORTED.items():
            if found.get(key, only) not in (None, only):
                raise ValueError(f"{key} = {found[key]!r} is not supported, only {only!r}")
        values = {field.name: found.get(field.name) for field in fields(cls)} | {"hf": hf}
        for name, value in values.items():
            if value is None:
                raise ValueError(f"no value for {name}")
        return cls(**values)


def with_known_names(hf: dict) -> dict:
    """A config.json under the names that MoEConfig reads, with defaults for what may be left out.

    transformers 5 writes num_local_experts and rope_parameters, where 4 has num_experts, rope_theta
    and rope_scaling.
    """
    rope = (hf.get("rope_parameters") or {}) | (hf.get("rope_scaling") or {})
    found = {"decoder_sparse_step": 1, "tie_word_embeddings": False} | hf
    found["num_experts"] = hf.get("num_experts", hf.get("num_local_experts"))
    found["rope_theta"] = hf.get("rope_theta", rope.get("rope_theta"))
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    found["mlp_only_layers"] = tuple(hf.get("mlp_only_layers") or ())
    if not hf.get("head_dim") and hf.get("hidden_size") and hf.get("num_attention_heads"):
        found["head_dim"] = hf["hidden_size"] // hf["num_attention_heads"]
    return found


# --- the layers


def at_least_fp32(x: Tensor) -> Tensor:
    """Softmax over experts and over the vocabulary is taken in fp32, as in vLLM."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope_tables(positions: Tensor, config: MoEConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, positions (S,) int -> two (S, 1, head_dim)."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * config.rope_theta ** (-half / config.head_dim)
    angles = torch.cat((angles, angles), dim=-1)[:, None]  # (S, 1, head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def cuda_kernels(x: Tensor) -> bool:
    """True if attention and experts of x take the kernels that torch has for CUDA in bf16.

    Tensors on meta, which have shapes and strides but no numbers, take them too, so that a test can
    walk through them on a machine without a GPU (tests/test_moe.py).
    """
    return x.device.type in ("cuda", "meta") and x.dtype == torch.bfloat16


@dataclass(frozen=True)
class Packed:
    """Where each sequence lies among the S tokens. Made once a forward, read by every layer."""

    lengths: list[int]  # none is 0; on the host, so that no layer waits for the GPU
    bounds: Tensor  # (sequences + 1,) int32: 0, then the end of each

    @classmethod
    def of(cls, lengths: list[int], device) -> "Packed":
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, bounds.to(device))


def attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Causal attention inside each packed sequence: q (S, H, head_dim), k and v with fewer heads.

    Returns a tensor like q.
    """
    if cuda_kernels(q):
        from torch.nn.attention.varlen import varlen_attn

        ends = packed.bounds
        longest = max(packed.lengths)
        causal = {"window_size": (-1, 0), "enable_gqa": True}
        return varlen_attn(q, k, v, ends, ends, longest, longest, **causal)

    # On a CPU, one call for each run of neighbours with equal lengths: no padding. In fp32, since
    # the backward of SDPA in bf16 is slow there.
    runs = [(n, len(list(same))) for n, same in itertools.groupby(packed.lengths)]
    sizes = [n * count for n, count in runs]
    pieces = [at_least_fp32(x).split(sizes) for x in (q, k, v)]
    out = []
    for (n, count), *qkv in zip(runs, *pieces, strict=True):
        heads = [x.unflatten(0, (count, n)).transpose(1, 2) for x in qkv]  # (count, heads, n, hd)
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        out.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).to(q.dtype)


class Attention(nn.Module):
    def __init__(self, c: MoEConfig):
        super().__init__()
        self.head_dim = c.head_dim
        width = c.num_attention_heads * c.head_dim
        kv_width = c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (S, heads, head_dim)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(q, k, v, packed).flatten(1))


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ends[i-1]:ends[i] of x times weight[i].T.

    x (rows, in), weight (E, out, in), ends (E,) int32 -> (rows, out).
    """
    on_cpu = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    if on_cpu or cuda_kernels(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    # No grouped kernel for this dtype. unbind, since the backward of weight[i] allocates all E
    # of them for each i.
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    pieces = zip(x.split(sizes), weight.unbind(0), strict=True)
    return torch.cat([rows @ w.T for rows, w in pieces])


class Experts(nn.Module):
    def __init__(self, c: MoEConfig):
        super().__init__()
        E, width, D = c.num_experts, c.moe_intermediate_size, c.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, width))

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """sum_i g_i FFN_i(x): x (S, D), experts (S, K) int, gates (S, K) -> (S, D)."""
        S, K = experts.shape
        E = len(self.down_proj)

        # Sort the S * K (token, expert) pairs by expert, and count where each expert's end.
        expert, order = experts.flatten().sort(stable=True)  # (S*K,) each
        token = order // K
        ids = torch.arange(E, device=x.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, ids, right=True, out_int32=True)  # (E,)

        gate_up = grouped_matmul(x.index_select(0, token), self.gate_up_proj, ends)
        gate, up = gate_up.chunk(2, dim=-1)
        y = grouped_matmul(F.silu(gate) * up, self.down_proj, ends)  # (S*K, D)
        y = y * gates.flatten().index_select(0, order)[:, None]

        if x.device.type == "cpu":
            return torch.zeros_like(x).index_add(0, token, y)
        # On CUDA index_add adds in no fixed order: no two forward passes would be equal.
        return y.index_select(0, order.argsort()).view(S, K, -1).sum(1)


class MoE(nn.Module):
    def __init__(self, c: MoEConfig):
        super().__init__()
        self.top_k = c.num_experts_per_tok
        self.normalize = c.norm_topk_prob
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)  # W_r; the format's name
        self.experts = Experts(c)

    def forward(self, x: Tensor, experts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (S, D), experts to replay (S, K) int or None; a row of -1 is not replayed.

        Returns y (S, D), the experts used (S, K), the experts that the router chose (S, K).
        """
        p = at_least_fp32(self.gate(x)).softmax(dim=-1)  # (S, E)
        chosen = p.topk(self.top_k, dim=-1).indices  # (S, K)
        used = chosen if experts is None else torch.where(experts < 0, chosen, experts)

        g = p.gather(-1, used)  # (S, K), from the live p: the router keeps its gradient
        if self.normalize:
            g = g / g.sum(-1, keepdim=True)
        return self.experts(x, used, g.to(x.dtype)), used, chosen


class MLP(nn.Module):
    """A dense layer's part in place of MoE: the same arguments and returns, but no experts."""

    def __init__(self, c: MoEConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.top_k = c.num_experts_per_tok

    def forward(self, x: Tensor, experts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.full((len(x), self.top_k), -1, device=x.device)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), none, none


class Layer(nn.Module):
    def __init__(self, c: MoEConfig, index: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c) if c.is_moe(index) else MLP(c)

    def forward(self, x: Tensor, cos, sin, packed, experts) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packed)
        y, used, chosen = self.mlp(self.post_attention_layernorm(x), experts)
        return x + y, used, chosen


class MoETransformer(nn.Module):
    """The whole model. With `checkpointing` each layer is recomputed in backward, not kept."""

    def __init__(self, config: MoEConfig, checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens, lengths=None, experts=None, live=False) -> tuple[Tensor, Tensor]:
        """tokens (B, T) int, lengths (B,) int (default T), experts to replay (B, T, L, K) int.

        Returns hidden (B, T, D), zero on padding, and the experts used (B, T, L, K) int16, -1 on
        padding and in dense layers. A row of `experts` that is -1 uses the router's choice. With
        `live` the second result is the router's choice instead; what the router saw, and the hidden
        states, still come from the experts used.

        Experts are an argument, not a state of the module, so that a layer that is recomputed in
        backward sees those of its own micro-batch. With `lengths` on the host nothing here waits
        for a GPU.
        """
        B, T = tokens.shape
        L = len(self.layers)
        sizes = [T] * B if lengths is None else lengths.tolist()
        spans = [torch.arange(b * T, b * T + n) for b, n in enumerate(sizes)]
        flat = torch.cat(spans).to(tokens.device)  # (S,) indices into B * T, padding left out
        row, position = flat // T, flat % T
        packed = Packed.of([n for n in sizes if n], tokens.device)

        x = self.embed_tokens(tokens.flatten().index_select(0, flat))  # (S, D)
        cos, sin = rope_tables(position, self.config, x.dtype)
        replayed = [None] * L
        if experts is not None:
            replayed = experts.flatten(0, 1).index_select(0, flat).long().unbind(1)  # L x (S, K)

        recompute = self.checkpointing and torch.is_grad_enabled()
        reported = []
        for layer, layer_experts in zip(self.layers, replayed, strict=True):
            run = partial(checkpoint, layer, **RECOMPUTE) if recompute else layer
            x, used, chosen = run(x, cos, sin, packed, layer_experts)
            reported.append((chosen if live else used).to(torch.int16))

        x = self.norm(x)  # (S, D)
        reported = torch.stack(reported, dim=1)  # (S, L, K)
        hidden = x.new_zeros(B, T, x.shape[-1]).index_put((row, position), x)
        padded = reported.new_full((B, T, *reported.shape[1:]), -1)
        return hidden, padded.index_put((row, position), reported)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature=1.0) -> tuple[Tensor, Tensor]:
        """hidden (..., D), targets (...) int -> log-probs of targets and entropies (nats), (...).

        Both are at least fp32, and of softmax(logits / temperature), as vLLM's without top_p.
        Logits exist a chunk of tokens at a time and, unless there is one chunk, are recomputed in
        backward. The entropy carries no gradient.
        """
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        rows = max(1, LOGIT_CHUNK // self.config.vocab_size)
        compute = head_logprobs
        if targets.numel() > rows:
            compute = partial(checkpoint, head_logprobs, **RECOMPUTE)

        logp, entropy = [], []
        chunks = zip(hidden.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
        for h, t in chunks:
            chunk_logp, chunk_entropy = compute(h, t, head.weight, temperature)
            logp.append(chunk_logp)
            entropy.append(chunk_entropy)
        logp = torch.cat(logp).view(targets.shape)
        # clone: FSDP warns if an output is a view.
        return logp.clone(), torch.cat(entropy).view(targets.shape)


def head_logprobs(h: Tensor, targets: Tensor, weight: Tensor, temperature: float):
    """(rows, D), (rows,), (V, D) -> log-probs (rows,) and entropies (rows,)."""
    logp = (at_least_fp32(F.linear(h, weight)) / temperature).log_softmax(-1)  # (rows, V)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


# --- safetensors in and out


def stored_as(name: str, p: Tensor) -> tuple[list[str], tuple[int, ...]]:
    """The checkpoint tensors that make up the parameter `name`, in the order in which they fill it.

    Returns their names and the shape that all of them have.
    """
    name = name if name.startswith("lm_head") else f"model.{name}"
    stacked = re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj", name)
    if not stacked:
        return [name], tuple(p.shape)
    prefix, kind = stacked.groups()
    matrices = ["gate", "up"] if kind == "gate_up" else ["down"]
    names = []
    for e in range(len(p)):
        names += [f"{prefix}{e}.{matrix}_proj.weight" for matrix in matrices]
    return names, (p.shape[1] // len(matrices), p.shape[2])


def meta_parameters(config: MoEConfig) -> dict[str, Tensor]:
    """Name -> parameter, without storage."""
    with torch.device("meta"):
        return dict(MoETransformer(config).named_parameters())


def stored_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a checkpoint of this model, in the order of hf_weights."""
    shapes = {}
    for name, p in meta_parameters(config).items():
        names, shape = stored_as(name, p)
        shapes |= dict.fromkeys(names, shape)
    return shapes


@torch.no_grad()
def hf_weights(model: MoETransformer, dtype=None) -> Iterator[tuple[str, Tensor]]:
    """Yields (checkpoint name, full tensor) in `dtype` (default: as stored), in a fixed order.

    At most one parameter is whole at a time. Of a sharded model every rank must walk all of it,
    since each step is a collective. A tensor may share memory with others of its parameter and, if
    nothing is sharded or cast, with the model: copy what outlives the next update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a forward left gathered is in the compute dtype
    for name, p in model.named_parameters():
        full = p.detach().to(dtype or p.dtype)  # cast first: half the bytes to gather
        if isinstance(full, DTensor):
            full = full.full_tensor()
        names, shape = stored_as(name, p)
        yield from zip(names, full.view(len(names), *shape), strict=True)


def check_weights(config: MoEConfig, model_dir: str | Path) -> None:
    """Checks names and shapes of a folder's tensors, by the headers of its safetensors.

    Raises ValueError, which names a file that is cut off, or a tensor that is missing, unknown or
    of the wrong shape.
    """
    for path in Path(model_dir).glob("*.safetensors"):
        try:
            safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: weights cannot be read: {error!r}") from None

    stored = dcp.HuggingFaceStorageReader(str(model_dir)).read_metadata().state_dict_metadata
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)  # some folders store it all the same
    wanted = stored_shapes(config)
    for name in [*wanted, *stored]:
        shape = tuple(stored[name].size) if name in stored else "missing"
        should = wanted.get(name, "unknown")
        if shape != should:
            raise ValueError(f"{model_dir}: {name} is {shape}, by config.json {should}")


@torch.no_grad()
def load_weights(model: MoETransformer, model_dir: str | Path) -> None:
    """Fills `model`, plain or sharded: each rank reads the rows that it holds.

    Raises as check_weights does.
    """
    check_weights(model.config, model_dir)
    state = {}  # checkpoint name -> the memory to fill
    for name, p in model.named_parameters():
        names, shape = stored_as(name, p)
        if len(names) == 1:
            state[names[0]] = p.detach()
            continue

        local, first = p.detach(), 0  # the experts of this rank
        if isinstance(p, DTensor):
            local = p.to_local()
            placed = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
            first = placed[1][0]
        tensors = len(names) // len(p)  # of an expert
        names = names[first * tensors : (first + len(local)) * tensors]
        state |= zip(names, local.view(len(names), *shape), strict=True)
    reader = dcp.HuggingFaceStorageReader(str(model_dir))
    with warnings.catch_warnings(action="ignore"):  # of no_dist: each rank loads for itself
        dcp.load(state, storage_reader=reader, no_dist=True)


def load_pretrained(model_dir: str | Path, device="cpu", dtype=torch.float32) -> MoETransformer:
    """The model of a folder, whole, on one device. (train.py shards first, then loads.)"""
    with torch.device("meta"):
        model = MoETransformer(MoEConfig.from_pretrained(model_dir)).to(dtype)
    load_weights(model.to_empty(device=device), model_dir)
    return model


def save_pretrained(model, out, dtype=torch.float32, like="", write=True) -> None:
    """Writes the folder that vLLM and transformers load, with the tokenizer files of `like`.

    out and like are paths. From 5 GB on the weights become a file a layer. Every rank of a sharded
    model must call it; the one with `write` writes, and holds one file's tensors on its host.
    """
    out = Path(out)
    if write:
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("model*.safetensors*"):
            old.unlink()
        for path in Path(like).iterdir() if like else []:
            if path.suffix in (".json", ".jinja", ".txt") and "safetensors" not in path.name:
                shutil.copy(path, out)

    # One file, or one a layer: embedding, layers, norm, head.
    small = sum(p.numel() for p in model.parameters()) * dtype.itemsize < ONE_FILE_BYTES
    groups = itertools.groupby(hf_weights(model, dtype), lambda w: small or w[0].split(".")[2:3])
    file_of = {}
    for number, (_, group) in enumerate(groups):
        file = "model.safetensors" if small else f"model-{number:05d}.safetensors"
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in group if write}
        file_of |= dict.fromkeys(tensors, file)
        if write:
            save_file(tensors, out / file, metadata={"format": "pt"})
            (out / file).chmod(0o644)  # it comes readable by its owner alone

    if write:
        config = model.config.hf
        key = "dtype" if "dtype" in config else "torch_dtype"
        jsons = {"config.json": config | {key: str(dtype).removeprefix("torch.")}}
        if not small:
            jsons["model.safetensors.index.json"] = {"metadata": {}, "weight_map": file_of}
        for name, content in jsons.items():
            (out / name).write_text(json.dumps(content, indent=2) + "\n")
