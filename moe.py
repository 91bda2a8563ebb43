"""Qwen3-MoE, and dense Qwen3, in plain torch, with one seam: a token's experts are the router's choice or given.

A layer is    x = x + Attention(norm(x));    x = x + MoE(norm(x)),    and the MoE of one token is

    p   = softmax(W_r x)                          over all E experts, in fp32
    e   = the K experts with the largest p        or the K experts that were handed in (replay.py)
    MoE = sum_{i in e} g_i * W_down_i (silu(W_gate_i x) * W_up_i x),    g_i = p_i / sum_{j in e} p_j (*)

The choice e is discrete: a rounding error in x can swap an expert, and then the token's probability jumps. The gates g
are smooth. Replay fixes e alone; g always comes from the live p, so the router keeps its gradient (paper, Sec. 3).
(*) or g_i = p_i, where the config has norm_topk_prob off.

Letters: B sequences, T positions, S = tokens of all sequences without padding, D width, L layers, E experts, K experts
per token, F width of an expert, V vocabulary. Sequences run packed: padding is dropped at the door, so it costs nothing
and reaches nothing; attention sees one sequence at a time, everything else S tokens. One sort by expert makes each
expert's tokens contiguous, and its matrices multiply those only.

Parameters have the names of the checkpoint format, but the experts of a layer are two stacked tensors, gate_up_proj
(E, 2F, D) and down_proj (E, D, F), which the format stores one by one. Left out: the load-balancing loss (the paper
does not use one), KV caches (vLLM samples), and what a config is refused for: biases, sliding windows, rope scaling.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from launch import files

ARCHITECTURE, DENSE = "Qwen3MoeForCausalLM", "Qwen3ForCausalLM"
SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
SUPPORTED |= {"rope_type": "default", "shared_expert_intermediate_size": 0}
RECOMPUTE = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here draws numbers
LOGIT_CHUNK = 2**26  # elements of one (tokens, V) block of logits: 256 MB in fp32


@dataclass(frozen=True)
class MoEConfig:
    """The numbers that shape the model; `hf` is the config.json they came from, kept for writing it back."""

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

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> "MoEConfig":
        """Reads config.json as transformers 4 or 5 writes it. ValueError names the file and the key that is wrong."""
        hf = files.settings(model_dir)
        try:
            return cls.from_dict(hf)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{Path(model_dir) / 'config.json'}: {error}") from None

    @classmethod
    def from_dict(cls, hf: dict) -> "MoEConfig":
        """`hf` is the content of a config.json. ValueError names the key that is wrong."""
        if not {ARCHITECTURE, DENSE} & set(kinds := hf.get("architectures") or []):
            raise ValueError(f"architectures is {kinds}, not {ARCHITECTURE} or {DENSE}")
        found = files.named(hf)
        if DENSE in kinds:  # each layer is an MLP
            found |= {"num_experts": 1, "num_experts_per_tok": 1, "decoder_sparse_step": 2**31}
            found |= {"norm_topk_prob": True, "moe_intermediate_size": hf.get("intermediate_size")}
        for key, only in SUPPORTED.items():
            if found.get(key, only) not in (None, only):
                raise ValueError(f"{key} = {found[key]!r} is not supported, only {only!r}")
        wanted = {f.name: f.type for f in fields(cls) if f.name != "hf"}
        c = cls(**files.values(found, wanted), hf=hf)
        if c.num_experts_per_tok > c.num_experts:
            raise ValueError(f"num_experts_per_tok is above num_experts = {c.num_experts}")
        if c.num_attention_heads % c.num_key_value_heads:
            raise ValueError("num_key_value_heads does not divide num_attention_heads")
        return c


# --- the layers


def wide(x: Tensor) -> Tensor:
    """At least fp32: softmax over experts and over the vocabulary is taken there, as in vLLM."""
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
    """Do attention and experts of x take the kernels that torch has for CUDA in bf16?

    Tensors on meta, which have shapes and strides but no numbers, take them too: so that they can be walked through
    on a machine without a GPU (tests/test_moe.py).
    """
    return x.device.type in ("cuda", "meta") and x.dtype == torch.bfloat16


@dataclass(frozen=True)
class Packed:
    """Where each sequence lies among the S tokens: made once a forward, read by every layer without a word to the host."""

    lengths: list[int]  # none is 0
    bounds: Tensor  # (sequences + 1,) int32: 0, then the end of each

    @classmethod
    def of(cls, lengths: list[int], device) -> "Packed":
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, bounds.to(device))


def attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Causal attention inside each packed sequence: q (S, H, head_dim), k and v with fewer heads -> like q."""
    if cuda_kernels(q):
        from torch.nn.attention.varlen import varlen_attn

        ends, longest = packed.bounds, max(packed.lengths)
        causal = {"window_size": (-1, 0), "enable_gqa": True}
        return varlen_attn(q, k, v, ends, ends, longest, longest, **causal)
    dtype, (q, k, v) = q.dtype, map(wide, (q, k, v))  # SDPA's bf16 backward is slow on a CPU
    runs = [(n, len(list(same))) for n, same in itertools.groupby(packed.lengths)]
    sizes = [n * count for n, count in runs]
    out = []
    for (n, count), *qkv in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        qkv = [z.view(count, n, -1, z.shape[-1]).transpose(1, 2) for z in qkv]  # (count, H, n, hd)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        out.append(y.transpose(1, 2).reshape(count * n, -1, y.shape[-1]))
    return torch.cat(out).to(dtype)


class Attention(nn.Module):
    def __init__(self, c: MoEConfig):
        super().__init__()
        self.head_dim = c.head_dim
        width, kv_width = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
        self.q_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in projections)  # (S, heads, hd)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(q, k, v, packed).flatten(1))


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ends[i-1]:ends[i] of x times weight[i].T: x (rows, in), weight (E, out, in), ends (E,) -> (rows, out)."""
    on_cpu = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    if on_cpu or cuda_kernels(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    # No grouped kernel for this dtype. unbind, since the backward of weight[i] allocates all E of them for each i.
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ w.T for rows, w in zip(x.split(sizes), weight.unbind(0), strict=True)])


class Experts(nn.Module):
    def __init__(self, c: MoEConfig):
        super().__init__()
        E, F_, D = c.num_experts, c.moe_intermediate_size, c.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F_, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))

    def forward(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """sum_i g_i FFN_i(x): x (S, D), experts (S, K) int, gates (S, K) -> (S, D)."""
        S, K = experts.shape
        chosen, order = experts.flatten().sort(stable=True)  # (S*K,) each
        token = order // K
        every = torch.arange(len(self.down_proj), device=x.device, dtype=chosen.dtype)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)  # (E,)
        gate, up = grouped_matmul(x.index_select(0, token), self.gate_up_proj, ends).chunk(2, -1)
        y = grouped_matmul(F.silu(gate) * up, self.down_proj, ends)  # (S*K, D)
        y = y * gates.flatten().index_select(0, order)[:, None]
        if x.device.type == "cpu":
            return torch.zeros_like(x).index_add(0, token, y)
        # There index_add adds in no fixed order: no two forward passes would be equal.
        return y.index_select(0, order.argsort()).view(S, K, -1).sum(1)


class MoE(nn.Module):
    def __init__(self, c: MoEConfig):
        super().__init__()
        self.top_k, self.normalize = c.num_experts_per_tok, c.norm_topk_prob
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)  # W_r; the format's name
        self.experts = Experts(c)

    def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (S, D), given (S, K) int or None -> y (S, D), experts used (S, K), experts the router chose (S, K)."""
        p = wide(self.gate(x)).softmax(dim=-1)  # (S, E)
        chosen = p.topk(self.top_k, dim=-1).indices  # (S, K)
        used = chosen if given is None else torch.where(given < 0, chosen, given)
        g = p.gather(-1, used)
        g = g / g.sum(-1, keepdim=True) if self.normalize else g
        return self.experts(x, used, g.to(x.dtype)), used, chosen


class MLP(nn.Module):
    """What a dense layer has in place of MoE: the same arguments and returns, but no routes."""

    def __init__(self, c: MoEConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.top_k = c.num_experts_per_tok

    def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.full((len(x), self.top_k), -1, device=x.device)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), none, none


class Layer(nn.Module):
    def __init__(self, c: MoEConfig, index: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c) if c.is_moe(index) else MLP(c)

    def forward(self, x: Tensor, cos, sin, packed, given) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packed)
        y, used, chosen = self.mlp(self.post_attention_layernorm(x), given)
        return x + y, used, chosen


class MoETransformer(nn.Module):
    """The whole model. `checkpointing` recomputes each layer in backward instead of keeping its activations."""

    def __init__(self, config: MoEConfig, checkpointing: bool = False):
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens, lengths=None, experts=None, live=False) -> tuple[Tensor, Tensor]:
        """tokens (B, T) int, lengths (B,) int (default T), experts (B, T, L, K) int (default: the router chooses).

        Returns hidden (B, T, D), zero on padding, and the experts used (B, T, L, K) int16, -1 on padding and in dense
        layers. A row of `experts` that is -1 uses the router's choice. With `live` the second result is instead what
        the router chose; what it saw, and the hidden states, still come from the experts used. Experts are call
        arguments, so a layer that is recomputed in backward sees those of its own micro-batch. `lengths` are best on
        the host, where places are counted: then nothing here waits for a GPU.
        """
        B, T = tokens.shape
        sizes = [T] * B if lengths is None else lengths.tolist()
        places = [torch.arange(b * T, b * T + n) for b, n in enumerate(sizes)]
        places = torch.cat(places).to(tokens.device)  # (S,) of B * T, padding left out
        packed = Packed.of([n for n in sizes if n], tokens.device)

        x = self.embed_tokens(tokens.flatten().index_select(0, places))  # (S, D)
        place = places % T
        cos, sin = rope_tables(place, self.config, x.dtype)
        given = [None] * len(self.layers)
        if experts is not None:
            given = experts.flatten(0, 1).index_select(0, places).long().unbind(1)
        again, routes = self.checkpointing and torch.is_grad_enabled(), []
        for layer, e in zip(self.layers, given, strict=True):
            run = partial(checkpoint, layer, **RECOMPUTE) if again else layer
            x, used, chosen = run(x, cos, sin, packed, e)
            routes.append((chosen if live else used).to(torch.int16))
        x, routes = self.norm(x), torch.stack(routes, dim=1)  # (S, D), (S, L, K)

        at = (places // T, place)
        padded = routes.new_full((B, T, *routes.shape[1:]), -1)
        return x.new_zeros(B, T, x.shape[-1]).index_put(at, x), padded.index_put(at, routes)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature=1.0) -> tuple[Tensor, Tensor]:
        """hidden (..., D), targets (...) int -> log-probs of targets and entropies (nats), both (...), at least fp32.

        Of softmax(logits / temperature), as vLLM reports them. Logits exist a chunk of tokens at a time and, unless
        there is one chunk, are recomputed in backward; the entropy carries no gradient.
        """
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        rows = max(1, LOGIT_CHUNK // self.config.vocab_size)
        chunks = zip(hidden.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
        inputs = ((h, t, head.weight, temperature) for h, t in chunks)
        again = partial(checkpoint, head_logprobs, **RECOMPUTE)
        parts = [(again if targets.numel() > rows else head_logprobs)(*z) for z in inputs]
        logp, entropy = (torch.cat(z).view(targets.shape) for z in zip(*parts, strict=True))
        return logp.clone(), entropy  # FSDP hooks its outputs, and warns of views

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> "MoETransformer":
        """Normal(0, std) for every matrix, ones for the norms; the same seed gives the same weights."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(0.0, std, generator=generator)
        return self


def head_logprobs(h: Tensor, targets: Tensor, weight: Tensor, temperature: float):
    """(rows, D), (rows,), (V, D) -> log-probs (rows,) and entropies (rows,)."""
    logp = (wide(F.linear(h, weight)) / temperature).log_softmax(-1)  # (rows, V)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


# --- safetensors in and out


def stored_as(name: str, p: Tensor) -> tuple[list[str], tuple[int, ...]]:
    """The checkpoint tensors that make up our parameter `name`, in the order in which they fill it; their shape."""
    name = name if name.startswith("lm_head") else f"model.{name}"
    stacked = re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj", name)
    if not stacked:
        return [name], tuple(p.shape)
    parts = ["gate", "up"] if stacked[2] == "gate_up" else ["down"]
    names = [f"{stacked[1]}{e}.{part}_proj.weight" for e in range(len(p)) for part in parts]
    return names, (p.shape[1] // len(parts), p.shape[2])


def meta_parameters(config: MoEConfig) -> dict[str, Tensor]:
    """Name -> parameter, without storage."""
    with torch.device("meta"):
        return dict(MoETransformer(config).named_parameters())


def stored_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a checkpoint of this model, in the order of hf_weights."""
    stored = [stored_as(name, p) for name, p in meta_parameters(config).items()]
    return {name: shape for names, shape in stored for name in names}


@torch.no_grad()
def hf_weights(model: MoETransformer, dtype=None) -> Iterator[tuple[str, Tensor]]:
    """Yields (checkpoint name, full tensor) in `dtype` (default: as stored), at most one parameter whole at a time.

    Of a sharded model every rank must walk all of it, since each step is a collective. A tensor may share memory with
    others of its parameter and, when nothing is sharded or cast, with the model: copy what outlives the next update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a forward left gathered would be handed out in the compute dtype
    for name, p in model.named_parameters():
        full = p.detach().to(dtype or p.dtype)  # cast first: half the bytes to gather
        full = full.full_tensor() if isinstance(full, DTensor) else full
        names, shape = stored_as(name, p)
        yield from zip(names, full.view(len(names), *shape), strict=True)


def check_weights(config: MoEConfig, model_dir: str | Path) -> dict[str, Path]:
    """Checkpoint name -> file of a folder's tensors, by the headers of its safetensors.

    Raises ValueError naming the folder or file, and the tensor that is missing, unknown or of the wrong shape.
    """
    stored, wanted = files.headers(model_dir), stored_shapes(config)
    for name in [*wanted, *stored]:
        is_, should = stored.get(name, (0, "missing"))[1], wanted.get(name, "unknown")
        if is_ != should:
            raise ValueError(f"{model_dir}: {name} is {is_}, by config.json {should}")
    return {name: file for name, (file, _) in stored.items()}


@torch.no_grad()
def load_weights(model: MoETransformer, model_dir: str | Path) -> None:
    """Fills `model`, plain or sharded: each rank reads the rows that it holds. Raises as check_weights does."""
    where = check_weights(model.config, model_dir)
    opened = {path: safe_open(path, framework="pt") for path in set(where.values())}
    for name, p in model.named_parameters():
        (names, shape), local, first = stored_as(name, p), p, 0
        if isinstance(p, DTensor):
            mine = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
            local, first = p.to_local(), mine[1][0]
        if len(names) > 1:  # a row is a whole expert, of one or two tensors
            rows = len(names) // len(p)
            blocks = local.view(len(local) * rows, *shape)
            for n, block in zip(names[first * rows :], blocks, strict=False):
                block.copy_(opened[where[n]].get_tensor(n))
        elif len(local):
            stored = opened[where[names[0]]].get_slice(names[0])
            local.copy_(stored[first : first + len(local)].view_as(local))


def load_pretrained(model_dir: str | Path, device="cpu", dtype=torch.float32) -> MoETransformer:
    """The model of a folder, whole, on one device. (train.py shards first, then calls load_weights.)"""
    with torch.device("meta"):
        model = MoETransformer(MoEConfig.from_pretrained(model_dir)).to(dtype)
    load_weights(model.to_empty(device=device), model_dir)
    return model


def save_pretrained(
    model: MoETransformer, out, dtype=torch.float32, like="", shard_bytes=5e9, write=True
) -> None:
    """Writes the folder that vLLM and transformers load, with the tokenizer files of the folder `like`.

    Every rank of a sharded model must call it; the one with `write` writes, with one file's tensors on its host.
    """
    shapes, config = stored_shapes(model.config), model.config.hf
    settings = {"dtype": dtype, "like": like, "shard_bytes": shard_bytes, "here": write}
    files.write(out, hf_weights(model, dtype), shapes, config, **settings)
