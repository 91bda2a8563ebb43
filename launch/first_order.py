"""What the first-order argument neglects, drawn: python launch/first_order.py [--out PNG]

Hardware: any CPU, one core. 6 s. Last run 2026-11-30.
Expected result: the gap between J_seq and J_token (less its constant) falls by 4 and the gap between their
gradients by 2 whenever the step h away from mu halves, for a tabular policy and for an MoE with replayed experts; the
MoE with its live router breaks the law at every h at which an expert flips, and obeys it below.

Both objectives and both gradients, exactly: the policies are so small that *all* responses are enumerated and weighted
by mu(y). Of each policy three cases, with a and b random directions in parameter space:

    discrepancy   pi_old = mu + h a    pi = pi_old
    staleness     pi_old = mu          pi = mu + h b
    both          pi_old = mu + h a    pi = pi_old + h b

It leaves a PNG and, beside it, a JSON with the numbers drawn. tests/test_formulation.py runs the same code.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.cold_start import init_weights
from loss import sequence_weight, token_weights
from moe import MoEConfig, MoETransformer

RESULTS = Path(__file__).resolve().parent / "results"
EOS, SYMBOLS = 2, 3  # EOS also stands at position 0, as the prompt
STEPS = [2.0**-k for k in range(12)]  # h
CASES = ("discrepancy", "staleness", "both")
TINY = {  # an MoE of ours whose vocabulary is the three symbols
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": SYMBOLS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16,
}


# --- policies small enough to enumerate


def all_responses(limit: int) -> tuple[Tensor, Tensor]:
    """Every response of at most `limit` symbols, ended by EOS or cut off: tokens (B, 1 + limit), mask alike.

    B = 2^(limit + 1) - 1; any policy's probabilities of them add up to 1.
    """
    ended = [(*y, EOS) for n in range(limit) for y in itertools.product((0, 1), repeat=n)]
    rows = [*ended, *itertools.product((0, 1), repeat=limit)]
    tokens = torch.tensor([(EOS, *y, *[EOS] * (limit - len(y))) for y in rows])  # (B, T)
    ends = torch.tensor([len(y) for y in rows])[:, None]
    place = torch.arange(1 + limit)
    return tokens, (place >= 1) & (place <= ends)


class Tabular(nn.Module):
    """pi(. | y_<t) = softmax(logits[y_<t]): a free row of logits for each prefix that can be continued."""

    def __init__(self, tokens: Tensor, mask: Tensor, seed: int):
        super().__init__()
        self.tokens, self.mask = tokens, mask
        self.node = torch.zeros_like(tokens)  # (B, T), of the prefix in the binary tree of prefixes
        for t in range(2, tokens.shape[1]):
            self.node[:, t] = 2 * self.node[:, t - 1] + 1 + tokens[:, t - 1]
        self.node *= mask
        rows, generator = 2 ** (tokens.shape[1] - 1) - 1, torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, SYMBOLS, generator=generator, dtype=torch.float64)
        self.logits = nn.Parameter(logits)

    def forward(self, experts: None = None) -> tuple[Tensor, None]:
        logp = self.logits.log_softmax(-1)[self.node, self.tokens]  # (B, T)
        return logp * self.mask, None


class TinyMoE(nn.Module):
    """moe.py's transformer in float64, as a policy over the same responses."""

    def __init__(self, tokens: Tensor, mask: Tensor, seed: int):
        super().__init__()
        self.tokens, self.mask = tokens, mask
        self.model = MoETransformer(MoEConfig.from_dict(TINY)).double()
        init_weights(self.model, seed, std=0.3)

    def forward(self, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """-> logp (B, T), experts used (B, T, L, K)."""
        lengths = 1 + self.mask.sum(-1)
        hidden, experts = self.model(self.tokens, lengths, experts)
        logp, _ = self.model.logprobs(hidden[:, :-1], self.tokens[:, 1:])
        return F.pad(logp, (1, 0)) * self.mask, experts


def logprobs_at(policy: nn.Module, theta: Tensor, experts: Tensor | None = None):
    """The log-probs (B, T) of all responses, and the experts, of `policy` with the parameters theta (flat)."""
    vector_to_parameters(theta, policy.parameters())
    return policy(experts)


def gradient(objective: Tensor, policy: nn.Module) -> Tensor:
    """d objective / d theta, flat."""
    parts = torch.autograd.grad(objective, [*policy.parameters()], retain_graph=True)
    return parameters_to_vector(parts)


def random_direction(policy: nn.Module, seed: int, size: float) -> Tensor:
    count, generator = sum(p.numel() for p in policy.parameters()), torch.Generator()
    return size * torch.randn(count, generator=generator.manual_seed(seed), dtype=torch.float64)


# --- first-order


def objectives(logp: Tensor, logp_mu: Tensor, rewards: Tensor, mask: Tensor):
    """J_seq and J_token less its constant E_mu[(1 - |y|) R], expectations over all responses: (B, T) x 2, (B,), (B, T).

    Both 0-d; equal at pi = mu, so any gap is what the token-level objective neglects.
    """
    mu = (logp_mu * mask).sum(-1).exp()  # (B,)
    constant = (1 - mask.sum(-1)) * rewards
    seq = sequence_weight(logp, logp_mu, mask) * rewards
    token = token_weights(logp, logp_mu, mask) * rewards + constant
    return (mu * seq).sum(), (mu * token).sum()


def gaps(policy: nn.Module, direction: Tensor, steps: list[float], replay: bool) -> dict:
    """The two gaps at pi = mu + h * direction for each h, the gradients' one relative to the gradient at mu.

    With `replay`, pi is computed under mu's experts (replay.py's R3); else the router is live, and `flips` counts the
    (input, layer) pairs whose experts are not mu's. `size` is the largest |d_t|, d_t = pi/mu - 1.
    """
    mask, theta = policy.mask, parameters_to_vector(policy.parameters()).detach().clone()
    rewards = torch.rand(len(mask), generator=torch.Generator().manual_seed(0)).double()
    logp_mu, routes = policy()
    logp_mu = logp_mu.detach()
    inputs = mask.roll(-1, 1)  # what a response token follows
    out = {"h": steps, "objective": [], "gradient": [], "size": [], "flips": []}
    for h in steps:
        logp, used = logprobs_at(policy, theta + h * direction, routes if replay else None)
        seq, token = objectives(logp, logp_mu, rewards, mask)
        grad_seq, grad_token = gradient(seq, policy), gradient(token, policy)
        out["objective"].append((seq - token).abs().item())
        out["gradient"].append(((grad_seq - grad_token).norm() / grad_seq.norm()).item())
        out["size"].append((logp - logp_mu).expm1().abs().max().item())
        moved = [] if routes is None else (used.sort().values != routes.sort().values).any(-1)
        out["flips"].append(0 if routes is None else int(moved[inputs].sum()))
    vector_to_parameters(theta, policy.parameters())
    return out


def first_order(steps: list[float] = STEPS, limit: int = 5, seed: int = 122) -> dict:
    """{policy: {case: gaps}} of the tabular policy, the MoE with mu's experts replayed and the MoE with a live router.

    The seed is one whose live router flips an expert down to small h in all three cases. With any seed flips end at
    some h, since a choice of experts is constant in a neighbourhood of mu; the law is lost wherever they have not.
    """
    tokens, mask = all_responses(limit)
    tabular, moe = Tabular(tokens, mask, seed), TinyMoE(tokens, mask, seed)
    out = {}
    policies = {"tabular": (tabular, 0.3), "MoE, replayed": (moe, 0.01), "MoE, live": (moe, 0.01)}
    for name, (policy, size) in policies.items():
        a, b = (random_direction(policy, seed + i, size) for i in (1, 2))
        directions = {"discrepancy": a, "staleness": b, "both": a + b}
        replay = name != "MoE, live"
        out[name] = {case: gaps(policy, directions[case], steps, replay) for case in CASES}
    return out


def draw_first_order(results: dict, out: Path) -> None:
    titles = {
        "discrepancy": r"discrepancy alone: $\pi = \pi_{old}$",
        "staleness": r"staleness alone: $\pi_{old} = \mu$",
        "both": "both",
    }
    kinds = {  # color, marker, label, order in h
        "objective": ("C0", "o", r"$|J_{seq} - J_{token}|$, less the constant", 2),
        "gradient": ("C1", "s", r"$|\nabla J_{seq} - \nabla J_{token}|\ /\ |\nabla J_{seq}|$", 1),
    }
    rows = {
        "a tabular policy": ["tabular"],
        "moe.py, filled: experts of $\\mu$ replayed": ["MoE, replayed", "MoE, live"],
    }
    figure, axes = plt.subplots(2, 3, figsize=(11.5, 7.4), sharex=True, sharey=True)
    for line, (row, names) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(row, fontsize=11)
        for (axis, case), name in itertools.product(zip(line, CASES, strict=True), names):
            r, live = results[name][case], name == "MoE, live"
            for kind, (color, marker, label, order) in kinds.items():
                style = {"mfc": "white", "ms": 3.5, "ls": ":", "label": f"{kind}s, live router"}
                style = style if live else {"ms": 6, "ls": "", "label": label}
                axis.loglog(r["h"], r[kind], color=color, marker=marker, lw=1.2, **style)
                if not live:
                    guide = [r[kind][-1] * (h / r["h"][-1]) ** order for h in r["h"]]
                    style = {"ls": "--" if order == 2 else "-.", "label": f"slope {order}"}
                    axis.loglog(r["h"], guide, color="0.35", lw=0.9, zorder=0, **style)
            if live:
                last = min(h for h, flips in zip(r["h"], r["flips"], strict=True) if flips)
                axis.axvspan(last / 2**0.5, r["h"][0] * 2**0.5, color="0.93", zorder=-1)
                note = {"transform": axis.get_xaxis_transform(), "fontsize": 8, "color": "0.35"}
                axis.text(last / 2**0.4, 0.03, "an expert has flipped", **note)
            axis.grid(alpha=0.25)
    for axis, case in zip(axes[0], CASES, strict=True):
        axis.set_title(titles[case], fontsize=11)
    for axis in axes[1]:
        axis.set_xlabel(r"$h$, distance of $\pi$ from $\mu$")
    axes[0, 0].set_xlim(results["tabular"]["both"]["h"][-1] / 1.4, 2**0.5)
    handles = dict(zip(*axes[1, 0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    figure.suptitle("What the token-level objective neglects, by enumeration of every response")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "first_order.png", help="picture")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = first_order()
    draw_first_order(results, args.out)
    for (name, cases), kind in itertools.product(results.items(), ("objective", "gradient")):
        for case, r in cases.items():
            falls = [a / b for a, b in itertools.pairwise(r[kind])]
            print(f"{name:14}{case:12}gap of {kind + 's':11}falls by", *(f"{x:.3g}" for x in falls))
    six_digits = json.loads(json.dumps(results), parse_float=lambda x: float(f"{float(x):.6g}"))
    args.out.with_suffix(".json").write_text(json.dumps(six_digits) + "\n")
    print(f"{args.out} and {args.out.with_suffix('.json').name}")


if __name__ == "__main__":
    main()
