"""moe.py is Qwen3-MoE: transformers' own model is the oracle, and the seam for replayed experts changes nothing else."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import EOS, TOKENS
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

import moe

LENGTHS = [9, 1, 14, 14, 2]  # ragged, a single token, two neighbours of equal length
V = len(TOKENS)


def make_batch(lengths=LENGTHS, seed=0):
    """tokens (B, T), zero on padding, and lengths (B,)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, V, (len(lengths), max(lengths)), generator=generator)
    lengths = torch.tensor(lengths)
    return tokens * inside(tokens, lengths), lengths


def inside(tokens, lengths):
    return torch.arange(tokens.shape[1]) < lengths[:, None]  # (B, T)


def random_experts(config, shape, seed=0):
    """Any K different experts for each token and layer: shape + (L, K)."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*shape, config.num_hidden_layers, config.num_experts, generator=generator)
    return order.argsort(-1)[..., : config.num_experts_per_tok].to(torch.int16)


def wave(n):
    """Fixed weights of either sign for sums, so that no two terms can be exchanged."""
    return torch.arange(1, n + 1).double().sin()


def next_token_sum(model, tokens, lengths, experts=None):
    """sum over all tokens but each first of wave * log p, a scalar with a gradient in every parameter; the routes."""
    hidden, routes = model(tokens, lengths, experts)
    at = inside(tokens, lengths)[:, 1:]
    logp, _ = model.logprobs(hidden[:, :-1][at], tokens[:, 1:][at])
    return (wave(len(logp)) * logp).sum(), routes


def gradients(model, scalar):
    model.zero_grad()
    scalar.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def furthest(a, b):
    """Largest difference of gradients relative to the parameter's largest (or 1e-3 of the model's largest)."""
    assert a.keys() == b.keys()
    floor = 1e-3 * max(g.abs().max() for g in b.values())
    return float(max((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=floor) for n in b))


def oracle(folder):
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)


def logits_of(model, tokens):
    return model(tokens[None]).logits[0]


def our_logits(model, tokens, lengths=None):
    hidden, _ = model(tokens, lengths)
    return F.linear(
        hidden, dict(model.named_parameters()).get("lm_head.weight", model.embed_tokens.weight)
    )


ROPE = {"rope_type": "default"}
CONFIGS = {
    "plain": {},
    "tied, one kv head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "dense first and third of four": {"mlp_only_layers": [0, 2], "num_hidden_layers": 4},
    "every second layer sparse, gates not normalized": {
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "num_hidden_layers": 4,
    },
    "K = 1, theta 1e6": {
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "rope_parameters": ROPE | {"rope_theta": 1e6},
    },
    "K = E, no groups, narrow heads, large eps": {
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rms_norm_eps": 1e-2,
    },
    "both kinds of dense, theta 100, tied": {
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "rope_parameters": ROPE | {"rope_theta": 100.0},
    },
}


# --- the same model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_gradients_and_routes_are_those_of_transformers(tiny, name):
    """A ragged batch gives transformers' logits, parameter gradients and experts, one sequence at a time there.

    Catches any error of the architecture: norms, rope, head grouping, gate normalization, gate and up exchanged, which
    layers are dense, tied heads.
    """
    folder = tiny(seed=1, **CONFIGS[name])
    ours, theirs = moe.load_pretrained(folder), oracle(folder)
    tokens, lengths = make_batch()
    scalar, routes = next_token_sum(ours, tokens, lengths)
    logits, total, logps = our_logits(ours, tokens, lengths), 0.0, []
    worst = 0.0
    for b, n in enumerate(LENGTHS):
        out = theirs(tokens[b : b + 1, :n], output_router_logits=True)
        worst = max(worst, float((logits[b, :n] - out.logits[0]).detach().abs().max()))
        logps.append(out.logits[0, :-1].log_softmax(-1).gather(-1, tokens[b, 1:n, None])[:, 0])
        routers, config = iter(out.router_logits), ours.config
        for layer in range(config.num_hidden_layers):
            used = routes[b, :n, layer].sort(-1).values
            if layer in config.dense_layers:
                assert (used == -1).all()
            else:
                chosen = next(routers).topk(config.num_experts_per_tok).indices
                assert torch.equal(used.long(), chosen.sort(-1).values)
        assert next(routers, None) is None
    logps = torch.cat(logps)
    total = (wave(len(logps)) * logps).sum()
    expected = {n.removeprefix("model."): g for n, g in gradients(theirs, total).items()}
    gap = furthest(gradients(ours, scalar), expected)
    print(f"{name}: logits differ by {worst:.1e} of {logits.abs().max():.1f}, gradients {gap:.1e}")
    assert worst < 1e-5
    assert gap < 1e-5


def test_padding_reaches_nothing(tiny):
    """Other padding tokens, more padding, experts given there: not one bit of outputs or gradients changes.

    Catches attention or routing over padding; and a sequence alone gives what it gives packed (1e-6 of the largest),
    which catches attention across the borders of sequences.
    """
    model = moe.load_pretrained(tiny())
    tokens, lengths = make_batch()
    keep = inside(tokens, lengths)
    experts = random_experts(model.config, tokens.shape)
    wider = torch.randint(2, V, (len(tokens), tokens.shape[1] + 5))
    wider[:, : tokens.shape[1]][keep] = tokens[keep]
    rubbish = torch.full((*wider.shape, *experts.shape[2:]), 999, dtype=torch.int16)
    rubbish[:, : tokens.shape[1]][keep] = experts[keep]
    weight = wave(int(lengths.sum()) * 64).view(-1, 64).float()
    for a, b in ((None, None), (experts, rubbish)):
        hidden, routes = model(tokens, lengths, a)
        padded, padded_routes = model(wider, lengths, b)
        real = inside(wider, lengths)
        assert torch.equal(hidden[keep], padded[real]) and torch.equal(
            routes[keep], padded_routes[real]
        )
        assert not padded[~real].any() and (padded_routes[~real] == -1).all()
        first = gradients(model, (hidden[keep] * weight).sum())
        second = gradients(model, (padded[real] * weight).sum())
        assert all(torch.equal(first[n], second[n]) for n in first)
        for row, n in enumerate(LENGTHS):
            alone, _ = model(
                tokens[row : row + 1, :n], None, None if a is None else a[row : row + 1, :n]
            )
            assert (alone[0] - hidden[row, :n]).abs().max() < 1e-6 * hidden.abs().max()


class LogitBlocks(TorchDispatchMode):
    """Records the size of every matrix product with V columns."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and out.shape[-1] == V:
            self.rows.append(len(out))
        return out


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_chunked_logprobs_equal_log_softmax(tiny, monkeypatch, tie_word_embeddings):
    """Log-probs, entropies and gradients of 11 tokens in chunks of 3, at temperature 0.7, equal the direct formula.

    Catches a temperature left out or applied twice, chunks in the wrong order, an entropy of other logits, and logits
    that exist whole or, of several chunks, are kept for backward (they must be made again there).
    """
    model = moe.load_pretrained(tiny(tie_word_embeddings=tie_word_embeddings))
    head = model.embed_tokens if tie_word_embeddings else model.lm_head
    hidden = torch.randn(11, 64, requires_grad=True)
    targets = torch.randint(V, (11,))
    logits = (hidden @ head.weight.T / 0.7).log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    expected = logits.gather(-1, targets[:, None])[:, 0]
    weight = wave(11).float()
    grads = torch.autograd.grad((expected * weight).sum(), (hidden, head.weight))
    for chunk, rows in ((3 * V, [3, 3, 3, 2]), (2**26, [11])):
        monkeypatch.setattr(moe, "LOGIT_CHUNK", chunk)
        with LogitBlocks() as blocks:
            logp, ours = model.logprobs(hidden, targets, 0.7)
            assert blocks.rows == rows
            found = torch.autograd.grad((logp * weight).sum(), (hidden, head.weight))
        assert sorted(blocks.rows) == sorted(rows * 2 if len(rows) > 1 else rows)
        torch.testing.assert_close(logp, expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(ours, entropy, rtol=0, atol=5e-6)
        assert not ours.requires_grad
        for a, b in zip(found, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_softmaxes_are_taken_in_fp32(tiny):
    """In bf16 the gates and the log-probs come from fp32 softmaxes, as in vLLM.

    Catches a softmax over 8 experts or the vocabulary in bf16, which is good to two digits.
    """
    model = moe.load_pretrained(tiny(), dtype=torch.bfloat16)
    hidden, targets = torch.randn(7, 64).bfloat16(), torch.randint(V, (7,))
    logp, entropy = model.logprobs(hidden, targets)
    expected = F.linear(hidden, model.lm_head.weight).float().log_softmax(-1)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, expected.gather(-1, targets[:, None])[:, 0])
    seen, block = [], model.layers[0].mlp
    block.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    block(hidden, None)
    _, used, gates = seen[0]
    p = block.gate(hidden).float().softmax(-1).gather(-1, used)
    assert torch.equal(gates, (p / p.sum(-1, keepdim=True)).bfloat16())


# --- the experts


def test_each_expert_multiplies_its_own_tokens_only(tiny, monkeypatch):
    """Two products a sparse layer, of S * K rows each, cut where the routes say: no padding, no expert over all tokens.

    Catches an experts loop that runs every expert over every token (E / K times the work, and right answers).
    """
    model = moe.load_pretrained(tiny(mlp_only_layers=[0]))
    calls, product = [], moe.grouped_matmul

    def counting(x, weight, ends):
        calls.append((len(x), ends.tolist()))
        return product(x, weight, ends)

    monkeypatch.setattr(moe, "grouped_matmul", counting)
    tokens, lengths = make_batch()
    _, routes = model(tokens, lengths)
    S, K = sum(LENGTHS), 2
    assert [rows for rows, _ in calls] == [S * K] * 4  # 2 sparse layers, gate_up and down
    for layer, (_, ends) in zip((1, 1, 2, 2), calls, strict=True):
        chosen = routes[inside(tokens, lengths)][:, layer].long().flatten()
        assert ends == chosen.bincount(minlength=8).cumsum(0).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_expert_without_tokens_is_not_touched(tiny, dtype):
    """NaN in an unused expert reaches no output and no gradient, and its own gradient is exactly zero.

    Catches masking by multiplication with zero gates, and uninitialized memory in the gradient of an empty group.
    """
    model = moe.load_pretrained(tiny(), dtype=dtype)
    tokens, lengths = make_batch()
    experts = random_experts(model.config, tokens.shape) % 4  # 4 to 7 get no token
    experts[..., 1] = (experts[..., 0] + 1) % 4
    before, _ = next_token_sum(model, tokens, lengths, experts)
    expected = gradients(model, before)
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.experts.gate_up_proj[4:] = float("nan")
            layer.mlp.experts.down_proj[4:] = float("nan")
    after, _ = next_token_sum(model, tokens, lengths, experts)
    assert torch.equal(before, after)
    for name, grad in gradients(model, after).items():
        assert torch.equal(grad, expected[name]), name
        if ".experts." in name:
            assert not grad[4:].any() and grad[:4].flatten(1).any(-1).all(), name


@pytest.mark.parametrize("normalize", [True, False])
def test_replayed_gates_come_from_the_live_router(tiny, normalize):
    """Given experts, a layer is sum_i g_i FFN_i with g from the live softmax over all E: a loop over tokens says so.

    Catches gates taken from the router's own top K, a softmax over the K given ones without norm_topk_prob, gates that
    are recorded instead of recomputed (the router would stop learning), and gates paired with the wrong expert.
    """
    block = moe.load_pretrained(tiny(norm_topk_prob=normalize)).layers[1].mlp
    x = torch.randn(6, 64)
    # Their order inside K matters not.
    given = torch.tensor([[7, 0], [3, 5], [0, 7], [2, 1], [6, 3], [4, 2]])
    y, used, _ = block(x, given)
    rows = []
    for t in range(6):
        p, out = block.gate(x[t]).softmax(-1), 0
        for e in given[t]:
            gate, up = (block.experts.gate_up_proj[e] @ x[t]).chunk(2)
            g = p[e] / p[given[t]].sum() if normalize else p[e]
            out = out + g * (block.experts.down_proj[e] @ (F.silu(gate) * up))
        rows.append(out)
    expected = torch.stack(rows)
    assert torch.equal(used, given)
    torch.testing.assert_close(y, expected, rtol=0, atol=5e-6)
    weight = wave(6 * 64).view(6, 64).float()
    expected = gradients(block, (expected * weight).sum())
    assert furthest(gradients(block, (y * weight).sum()), expected) < 1e-5
    assert expected["gate.weight"].abs().max() > 1e-3


def test_float64_loop_equals_grouped_and_its_gradients_are_derivatives(tiny):
    """The float64 path (a plain loop) agrees with float32's grouped kernels, and with finite differences.

    Catches an error that both kinds of forward share with autograd, such as a detached factor or an in-place write.
    """
    folder = tiny(num_hidden_layers=2)
    single, double = (moe.load_pretrained(folder, dtype=d) for d in (torch.float32, torch.float64))
    tokens, lengths = make_batch([7, 4])
    experts = random_experts(double.config, tokens.shape)  # held fixed: a choice has no derivative
    (a, _), (b, _) = (m(tokens, lengths, experts) for m in (single, double))
    torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)
    exact = gradients(double, next_token_sum(double, tokens, lengths, experts)[0])
    close = gradients(single, next_token_sum(single, tokens, lengths, experts)[0])
    assert furthest({n: g.double() for n, g in close.items()}, exact) < 1e-5
    with torch.no_grad():
        for name, p in double.named_parameters():
            step, saved = torch.randn_like(p) * 1e-5, p.clone()
            ends = []
            for sign in (1, -1):
                p.copy_(saved + sign * step)
                ends.append(next_token_sum(double, tokens, lengths, experts)[0])
            p.copy_(saved)
            slope = (exact[name] * step).sum()
            torch.testing.assert_close(
                (ends[0] - ends[1]) / 2, slope, rtol=1e-5, atol=1e-11, msg=name
            )


# --- replay


def test_dense_layers_keep_their_slice(tiny):
    """With mlp_only_layers=[0], the second of 3 layers replays slice 1 and the third slice 2; slice 0 nothing.

    Catches slices counted over sparse layers only, which shifts every layer's experts by one.
    """
    model = moe.load_pretrained(tiny(mlp_only_layers=[0]))
    seen = {}
    for i in (1, 2):
        model.layers[i].mlp.experts.register_forward_pre_hook(
            lambda _, args, i=i: seen.__setitem__(i, args[1])
        )
    tokens, lengths = make_batch([6])
    given = random_experts(model.config, tokens.shape)
    _, used = model(tokens, lengths, given)
    assert torch.equal(seen[1].short(), given[0, :, 1]) and torch.equal(
        seen[2].short(), given[0, :, 2]
    )
    assert (used[:, :, 0] == -1).all() and torch.equal(used[:, :, 1:], given[:, :, 1:])
    for changed, differs in ((0, False), (1, True), (2, True)):
        other = given.clone()
        other[:, :, changed] = random_experts(model.config, tokens.shape, seed=9)[:, :, changed]
        a, b = (model(tokens, lengths, e)[0] for e in (given, other))
        assert torch.equal(a, b) != differs, changed


def test_rows_of_minus_one_use_the_router_and_live_reports_it(tiny):
    """Rows of -1 take the router's choice, all -1 is no replay bit for bit; live=True reports the router's choice.

    Catches -1 read as the last expert, and a record of "live" routes that merely repeats what was replayed, which
    would make routing_agreement 100% under R3.
    """
    model = moe.load_pretrained(tiny())
    choice = {}
    for i, layer in enumerate(model.layers):
        layer.mlp.gate.register_forward_hook(
            lambda _, args, out, i=i: choice.__setitem__(i, out.topk(2).indices.short())
        )
    tokens, lengths = make_batch([8])
    plain, routes = model(tokens, lengths)
    given = random_experts(model.config, tokens.shape, seed=3)
    unreplayed, same = model(tokens, lengths, torch.full_like(given, -1))
    assert torch.equal(plain, unreplayed) and torch.equal(routes, same)
    given[:, ::2, 1] = -1  # every second token, in the second layer
    hidden, used = model(tokens, lengths, given)
    again, live = model(tokens, lengths, given, live=True)
    assert torch.equal(hidden, again)
    assert torch.equal(live[0], torch.stack([choice[i] for i in range(3)], 1))
    assert torch.equal(used, torch.where(given < 0, live, given)) and not torch.equal(used, live)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_recomputation_replays_the_same_experts(tiny, mode):
    """Two micro-batches forward, then both backward, with and without checkpointing: equal gradients and routes.

    Catches routes kept on the module, where the second forward overwrites what the first's recomputation reads, and
    records that the recomputation doubles. Under the same routing pi_old without gradient is pi: ratio 1.
    """
    folder = tiny(num_hidden_layers=2)
    older = moe.load_pretrained(folder)
    with torch.no_grad():
        for p in older.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 * float(p.std()))
    batches = [make_batch([8, 5], seed=1), make_batch([8, 6], seed=2)]
    record = {
        "R2": lambda tokens, lengths: older(tokens, lengths)[1],
        "R3": lambda tokens, lengths: random_experts(older.config, tokens.shape, seed=4),
    }[mode]
    given, grads = [record(*batch) for batch in batches], []
    for checkpointing in (False, True):
        model, passes = moe.load_pretrained(folder), []
        model.checkpointing = checkpointing
        model.layers[0].mlp.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        outs = [next_token_sum(model, *b, e) for b, e in zip(batches, given, strict=True)]
        for batch, e, (scalar, routes) in zip(batches, given, outs, strict=True):
            keep = inside(*batch)
            assert routes.shape == e.shape and torch.equal(routes[keep], e[keep])
            with torch.no_grad():  # pi_old, and a pass under the live router for good measure
                assert abs(next_token_sum(model, *batch, e)[0] - scalar) < 1e-6
                assert abs(next_token_sum(model, *batch)[0] - scalar) > 1e-3
        passes.clear()
        outs[0][0].backward()
        outs[1][0].backward()
        assert len(passes) == 2 * checkpointing  # it did recompute
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert furthest(grads[1], grads[0]) < 1e-6


# --- the kernels of a GPU, on meta


class Watch(TorchDispatchMode):
    """The operations of a pass in order; those that make a GPU wait for the host or the host for it, by themselves."""

    WAITS = {"_local_scalar_dense", "nonzero", "bincount", "lift_fresh", "masked_select"}

    def __init__(self):
        super().__init__()
        self.seen, self.waits = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        name = op.name().removeprefix("aten::").split(".")[0]
        self.seen.append(name)
        flat = [z for a in (*args, out) for z in (a if isinstance(a, (list, tuple)) else [a])]
        tensors = [z for z in flat if isinstance(z, torch.Tensor)]
        moved = "copy" in name and len({z.device for z in tensors}) > 1
        by_mask = name.startswith("index") and any(z.dtype == torch.bool for z in tensors)
        if moved or by_mask or name in self.WAITS:
            self.waits.append(name)
        return out


def walk(layers: int, mode: str, checkpointing: bool, lengths=(700, 1, 323)) -> Watch:
    """Forward and backward of the 30B's first layers, embedding and head on meta in bf16."""
    from launch.plan import PUBLISHED

    c = moe.MoEConfig.from_dict(PUBLISHED | {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = moe.MoETransformer(c, checkpointing).to(torch.bfloat16)
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        given = torch.zeros(*tokens.shape, layers, c.num_experts_per_tok, dtype=torch.int16)
    on_host = torch.tensor(lengths)
    with Watch() as watch:
        hidden, routes = model(tokens, on_host, given if mode == "replayed" else None)
        assert hidden.shape == (*tokens.shape, c.hidden_size) and hidden.dtype == torch.bfloat16
        assert routes.shape == given.shape and routes.dtype == torch.int16
        watch.seen.append("backward")
        hidden.sum().backward()
    for name, p in model.named_parameters():
        used = name != "lm_head.weight"
        assert (p.grad is not None) == used and (not used or p.grad.dtype == torch.bfloat16), name
    return watch


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["replayed", "live"])
def test_a_layer_of_the_30b_runs_the_kernels_of_a_gpu_and_waits_for_nothing(mode, checkpointing):
    """On meta, torch's own checks of signature, shape, dtype, stride and alignment for varlen attention and grouped_mm,
    forward and backward; and no layer reads a number back, makes a tensor from a list or indexes by a mask: one layer
    or three, what waits is the same: places and bounds, counted on the host, are copied *to* the device.

    Catches a host synchronization in a layer, which holds up FSDP's next gather. It cannot see numbers, nor that flash
    attention takes no fp32 (cuda_kernels says so): launch/gpu_check.py compares those, on a GPU.
    """
    one, three = (walk(layers, mode, checkpointing) for layers in (1, 3))
    assert one.waits == three.waits == ["_to_copy", "lift_fresh", "_to_copy"], three.waits
    end = three.seen.index("backward")
    forward, backward = three.seen[:end], three.seen[end:]
    again = 3 if checkpointing else 0
    attention, grouped = "torch_attn::_varlen_attn", "_grouped_mm"
    assert (forward.count(attention), forward.count(grouped)) == (3, 2 * 3)
    assert (backward.count(attention), backward.count(f"{attention}_backward")) == (again, 3)
    assert backward.count(grouped) == 2 * again + 2 * 2 * 3  # gradients of rows and of weights


@pytest.mark.parametrize(
    ("device", "dtype", "theirs"),
    [
        ("meta", torch.bfloat16, True),
        ("meta", torch.float32, False),  # flash attention takes none, nor does grouped_mm there
        ("cpu", torch.bfloat16, False),
    ],
)
def test_which_kernels(device, dtype, theirs):
    """A GPU's kernels for bf16 on a GPU (or on meta) alone. Catches fp32 on CUDA, which flash attention refuses."""
    assert moe.cuda_kernels(torch.empty(2, device=device, dtype=dtype)) == theirs


def test_a_watch_sees_what_waits():
    """Each kind of wait that the test above must not miss, one by one."""
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, True])
    kinds = {
        "item": lambda: x[1].item(),
        "a list": lambda: torch.tensor([1, 2]),
        "mask": lambda: x[mask],
        "bincount": lambda: x.long().bincount(minlength=5),
        "copy": lambda: x.to("meta"),
        "nonzero": lambda: mask.nonzero(),
    }
    for name, wait in kinds.items():
        with Watch() as watch:
            wait()
        assert watch.waits, (name, watch.seen)
    for read in (lambda z: z.tolist(), lambda z: z.cpu(), lambda z: z.item()):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            read(torch.ones(1, device="meta"))


# --- config.json


def rewrite(folder, out, drop=(), **changes):
    """A copy of `folder` whose config.json lacks the keys `drop` and has `changes`."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in drop} | changes
    (out / "config.json").write_text(json.dumps(config))
    return out


NEW = ("rope_parameters", "num_local_experts", "num_experts", "rope_theta", "dtype", "torch_dtype")


def test_config_of_either_transformers_generation(tiny, tmp_path):
    """Keys as transformers 4 and 5 write them give equal logits, which depend on theta; so does head_dim null.

    Catches a theta that silently becomes 10,000 (fluent but wrong), and a head_dim taken as hidden / heads.
    """
    folder = tiny(head_dim=16)  # = 64 / 4, so that it may be left out
    four = {"num_experts": 8, "rope_theta": 5000, "rope_scaling": None, "torch_dtype": "float32"}
    rope = ROPE | {"rope_theta": 5000.0}
    five = {"num_local_experts": 8, "rope_parameters": rope, "dtype": "float32"}
    variants = {
        "four": rewrite(folder, tmp_path / "four", NEW, **four),
        "five": rewrite(folder, tmp_path / "five", NEW, **five),
        "typeless": rewrite(folder, tmp_path / "typeless", rope_parameters={"rope_theta": 5000.0}),
        "null": rewrite(folder, tmp_path / "null", head_dim=None, mlp_only_layers=None),
        "absent": rewrite(folder, tmp_path / "absent", ["head_dim", "mlp_only_layers"]),
    }
    tokens, _ = make_batch([12])
    expected = our_logits(moe.load_pretrained(folder), tokens)
    for name, variant in variants.items():
        assert torch.equal(our_logits(moe.load_pretrained(variant), tokens), expected), name
    other = rewrite(folder, tmp_path / "other", NEW, **(four | {"rope_theta": 1e6}))
    assert (our_logits(moe.load_pretrained(other), tokens) - expected).abs().max() > 1e-3
    assert moe.MoEConfig.from_pretrained(tiny()).head_dim == 32  # given, and not 64 / 4


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
BAD = {
    "no theta": (["rope_parameters"], {}, "rope_theta"),
    "theta null": ([], {"rope_parameters": ROPE | {"rope_theta": None}}, "rope_theta"),
    "another architecture": ([], {"architectures": ["Qwen2MoeForCausalLM"]}, "architectures"),
    "no architecture": (["architectures"], {}, "architectures"),
    "yarn, 4": (
        [],
        {"rope_theta": 1e4, "rope_parameters": None, "rope_scaling": YARN | {"type": "yarn"}},
        "rope_type",
    ),
    "yarn, 5": (
        [],
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_type",
    ),
    "yarn beside theta": ([], {"rope_scaling": YARN | {"rope_type": "yarn"}}, "rope_type"),
    "attention bias": ([], {"attention_bias": True}, "attention_bias"),
    "sliding window": ([], {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    "activation": ([], {"hidden_act": "gelu"}, "hidden_act"),
    "shared expert": ([], {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_"),
    "no experts": (["num_local_experts"], {}, "num_experts"),
    "no norm_topk_prob": (["norm_topk_prob"], {}, "norm_topk_prob"),
    "no width": (["hidden_size", "head_dim"], {}, "hidden_size"),
    "heads null": (["head_dim"], {"num_attention_heads": None}, "num_attention_heads"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_cannot_be_honoured_is_refused(tiny, tmp_path, name):
    """Each is a ValueError naming file and key. Catches a default in place of a missing or unsupported value."""
    drop, changes, key = BAD[name]
    folder = rewrite(tiny(), tmp_path / "bad", drop, **changes)
    with pytest.raises(ValueError, match=key) as caught:
        moe.MoEConfig.from_pretrained(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\xff"])
def test_a_config_that_is_not_json_is_refused(tmp_path, text):
    """A missing, empty, cut or binary config.json is a ValueError naming the file, not a traceback from json."""
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        moe.MoEConfig.from_pretrained(tmp_path)


# --- safetensors


@pytest.mark.parametrize("name", ["plain", "tied, one kv head", "dense first and third of four"])
def test_folders_round_trip_bit_for_bit(tiny, tmp_path, monkeypatch, name):
    """Loaded and saved, in one file or several with an index, a folder has transformers' names, shapes and bits again.

    Transformers loads it to equal logits and the tokenizer comes along. Catches gate and up exchanged on both ways
    (a round trip of ours alone would not), a shard left out of the index, tied heads stored twice.
    """
    folder = tiny(**CONFIGS[name])
    stored, model = load_file(folder / "model.safetensors"), moe.load_pretrained(folder)
    handed = {n: w.clone() for n, w in moe.hf_weights(model)}
    assert {n: w.shape for n, w in handed.items()} == {n: w.shape for n, w in stored.items()}
    tokens, _ = make_batch([10])
    expected = logits_of(oracle(folder), tokens[0])
    for out, limit in ((tmp_path / "one", 5e9), (tmp_path / "several", 50_000)):
        monkeypatch.setattr(moe, "ONE_FILE_BYTES", limit)
        moe.save_pretrained(model, out, like=folder)
        files = sorted(out.glob("*.safetensors"))
        tensors = {n: w for f in files for n, w in load_file(f).items()}
        assert tensors.keys() == stored.keys()
        assert all(
            torch.equal(tensors[n], stored[n]) and torch.equal(handed[n], stored[n]) for n in stored
        )
        if limit == 50_000:
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert index["weight_map"] == {n: f.name for f in files for n in load_file(f)}
            assert len(files) >= 2 + len(model.layers)  # embedding, layers, norm, head
        else:
            assert [f.name for f in files] == ["model.safetensors"]
        again = dict(moe.load_pretrained(out).named_parameters())
        assert all(torch.equal(p, again[n]) for n, p in model.named_parameters())
        assert torch.equal(logits_of(oracle(out), tokens[0]), expected)
        tokenizer, text = AutoTokenizer.from_pretrained(out), "12+34 = 46.\nYes  !"
        ids = [TOKENS.index(c) for c in text]
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == EOS


def test_bf16_export(tiny, tmp_path):
    """A bf16 export holds each weight rounded once, and config.json says so. Catches a dtype that vLLM would upcast."""
    folder = tiny()
    model = moe.load_pretrained(folder)
    moe.save_pretrained(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[n], w.bfloat16()) for n, w in stored.items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    loaded = moe.load_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(w, stored[n].bfloat16().float()) for n, w in moe.hf_weights(loaded))


def test_saving_over_an_older_export(tiny, tmp_path, monkeypatch):
    """One file saved where several were: the newer model loads, and no older file is left.

    Catches the old index, which still names the old files, and shards that vLLM, which without an index reads every
    safetensors file there is, would load as well.
    """
    old, new = (moe.load_pretrained(tiny(seed=s)) for s in (0, 5))
    with monkeypatch.context() as patch:
        patch.setattr(moe, "ONE_FILE_BYTES", 50_000)
        moe.save_pretrained(old, tmp_path)
    moe.save_pretrained(new, tmp_path)
    found = dict(moe.load_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(p, found[n]) for n, p in new.named_parameters())
    assert [f.name for f in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def damage(folder, kind):
    """Damages the single safetensors file of a folder; returns what the error has to name."""
    path = folder / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.experts.3.up_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "extra":
        name = "model.layers.7.mlp.gate.weight"
        tensors[name] = torch.zeros(8, 64)
    elif kind == "transposed":
        tensors[name] = tensors[name].T.contiguous()
    elif kind == "without head":
        name = "lm_head.weight"
        del tensors[name]
    save_file(tensors, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "no file":
        path.unlink()
    return name if kind in ("missing", "extra", "transposed", "without head") else str(folder)


@pytest.mark.parametrize(
    "kind", ["missing", "extra", "transposed", "without head", "truncated", "no file"]
)
def test_damaged_weights_are_refused(tiny, tmp_path, kind):
    """Each is a ValueError naming the tensor, or the folder that cannot be read. Catches weights left uninitialized."""
    folder = shutil.copytree(tiny(), tmp_path / "copy")
    named = damage(folder, kind)
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        moe.load_pretrained(folder)


def test_a_tied_folder_may_store_the_head_all_the_same(tiny, tmp_path):
    """Some exports write lm_head.weight beside tie_word_embeddings; it is ignored, not refused as unknown."""
    folder = shutil.copytree(tiny(tie_word_embeddings=True), tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert dict(moe.hf_weights(moe.load_pretrained(folder))).keys() == tensors.keys() - {
        "lm_head.weight"
    }
