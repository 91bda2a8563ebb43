"""The derivation of loss.py, executed: every step from Eq. 1 to MiniRL is checked by enumerating all responses.

It reads like a notebook: first two policies that are small enough to enumerate, then J_seq, J_token and their gaps, then
the claims, in the order of the paper. The policies have three symbols, one of which ends a response, and at most five
steps: J_seq, J_token and their gradients are sums over 63 responses, exact in float64. One policy is a table of logits,
the other moe.py's transformer. `python launch/first_order.py` draws the experiment. Every docstring names a mutation of the sources that was tried by hand and that the test caught; where several claims
rest on the mutated function, their tests fail along with it.
"""

import copy
import io
import itertools
import math
import re
import tokenize
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import loss
import moe
import replay
from launch.cold_start import init_weights

torch.set_num_threads(1)
OPEN = {"clip": False, "is_cap": math.inf}  # MiniRL without mask and cap: Eq. 4 itself
EPS = {"eps_low": 0.2, "eps_high": 0.27}

EOS, SYMBOLS = 2, 3  # EOS also stands at position 0, as the prompt
STEPS = [2.0**-k for k in range(12)]  # h
CASES = ("discrepancy", "staleness", "both")
TINY = {  # an MoE of ours whose vocabulary is the three symbols
    "architectures": [moe.ARCHITECTURE],
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


class Tabular(torch.nn.Module):
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
        self.logits = torch.nn.Parameter(logits)

    def forward(self, experts: None = None) -> tuple[Tensor, None]:
        logp = self.logits.log_softmax(-1)[self.node, self.tokens]  # (B, T)
        return logp * self.mask, None


class TinyMoE(torch.nn.Module):
    """moe.py's transformer in float64, as a policy over the same responses."""

    def __init__(self, tokens: Tensor, mask: Tensor, seed: int):
        super().__init__()
        self.tokens, self.mask = tokens, mask
        self.model = moe.MoETransformer(moe.MoEConfig.from_dict(TINY)).double()
        init_weights(self.model, seed, std=0.3)

    def forward(self, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """-> logp (B, T), experts used (B, T, L, K)."""
        lengths = 1 + self.mask.sum(-1)
        hidden, experts = self.model(self.tokens, lengths, experts)
        logp, _ = self.model.logprobs(hidden[:, :-1], self.tokens[:, 1:])
        return F.pad(logp, (1, 0)) * self.mask, experts


def logprobs_at(policy: torch.nn.Module, theta: Tensor, experts: Tensor | None = None):
    """The log-probs (B, T) of all responses, and the experts, of `policy` with the parameters theta (flat)."""
    vector_to_parameters(theta, policy.parameters())
    return policy(experts)


def gradient(objective: Tensor, policy: torch.nn.Module) -> Tensor:
    """d objective / d theta, flat."""
    parts = torch.autograd.grad(objective, [*policy.parameters()], retain_graph=True)
    return parameters_to_vector(parts)


def random_direction(policy: torch.nn.Module, seed: int, size: float) -> Tensor:
    count, generator = sum(p.numel() for p in policy.parameters()), torch.Generator()
    return size * torch.randn(count, generator=generator.manual_seed(seed), dtype=torch.float64)


# --- J_seq, J_token and what lies between them


def objectives(logp: Tensor, logp_mu: Tensor, rewards: Tensor, mask: Tensor):
    """J_seq and J_token less its constant E_mu[(1 - |y|) R], expectations over all responses: (B, T) x 2, (B,), (B, T).

    Both 0-d; equal at pi = mu, so any gap is what the token-level objective neglects.
    """
    mu = (logp_mu * mask).sum(-1).exp()  # (B,)
    constant = (1 - mask.sum(-1)) * rewards
    seq = loss.sequence_weight(logp, logp_mu, mask) * rewards
    token = loss.token_weights(logp, logp_mu, mask) * rewards + constant
    return (mu * seq).sum(), (mu * token).sum()


def gaps(policy: torch.nn.Module, direction: Tensor, steps: list[float], replay: bool) -> dict:
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
    tabular, small = Tabular(tokens, mask, seed), TinyMoE(tokens, mask, seed)
    out = {}
    policies = {
        "tabular": (tabular, 0.3),
        "MoE, replayed": (small, 0.01),
        "MoE, live": (small, 0.01),
    }
    for name, (policy, size) in policies.items():
        a, b = (random_direction(policy, seed + i, size) for i in (1, 2))
        directions = {"discrepancy": a, "staleness": b, "both": a + b}
        replay = name != "MoE, live"
        out[name] = {case: gaps(policy, directions[case], steps, replay) for case in CASES}
    return out


# --- what the tests share


def close(a, b, rtol=1e-12):
    """|a - b| <= rtol * |b|, as vectors; prints what it compared if not."""
    error, scale = (a - b).norm().item(), b.norm().item()
    assert error <= rtol * scale, (error, scale)


def perturbed(limit: int, seed: int = 0, size: float = 0.4, moved: str = "both"):
    """A tabular policy at pi, and log pi_old and log mu of every response, rewards, mask: mu -> pi_old -> pi.

    `moved` leaves out one of the two steps: "discrepancy" has pi = pi_old, "staleness" has pi_old = mu.
    """
    tokens, mask = all_responses(limit)
    policy = Tabular(tokens, mask, seed)
    theta = parameters_to_vector(policy.parameters()).detach().clone()
    a, b = (random_direction(policy, seed + i, size) for i in (1, 2))
    a, b = a * (moved != "staleness"), b * (moved != "discrepancy")
    logp_rollout, logp_old = (logprobs_at(policy, z)[0].detach() for z in (theta, theta + a))
    logprobs_at(policy, theta + a + b)
    rewards = torch.rand(len(mask), generator=torch.Generator().manual_seed(seed)).double()
    return policy, logp_old, logp_rollout, rewards, mask


def jacobian(policy) -> torch.Tensor:
    """grad log pi(y_t) of every token of every response: (B, T, parameters)."""
    logp = policy()[0]
    rows = [gradient(x, policy) for x in logp.flatten()]
    return torch.stack(rows).view(*logp.shape, -1)


@torch.enable_grad()
def token_gradient(objective, logp, logp_old, logp_rollout, adv, mask, **kwargs) -> torch.Tensor:
    """d loss / d log pi(y_t) with denom 1 unless told: (B, T)."""
    leaf = logp.detach().clone().requires_grad_()
    value, _ = objective(leaf, logp_old, logp_rollout, adv, mask, **{"denom": 1, **kwargs})
    return torch.autograd.grad(value, leaf)[0]


def token_weight(logp, logp_old, logp_rollout, mask, **flags) -> torch.Tensor:
    """The weight that minirl_loss gives to grad log pi(y_t), without mask and cap: (B, T)."""
    batch = logp, logp_old, logp_rollout, torch.ones(len(mask)).double(), mask
    return -token_gradient(loss.minirl_loss, *batch, **OPEN, **flags)


def random_batch(seed: int = 0, B: int = 8, T: int = 9):
    """Log-probs with ratios well outside the trust region, advantages of both signs and a zero, ragged masks."""
    g = torch.Generator().manual_seed(seed)
    logp, logp_old, logp_rollout = torch.randn(3, B, T, generator=g, dtype=torch.float64) * 0.3 - 2
    adv = torch.randn(B, generator=g, dtype=torch.float64)
    adv[0] = 0.0
    first = torch.randint(1, 4, (B, 1), generator=g)
    length = torch.randint(1, T - 3, (B, 1), generator=g)
    place = torch.arange(T)
    return logp, logp_old, logp_rollout, adv, (place >= first) & (place < first + length)


@cache
def enumerated() -> dict:
    """first_order at its steps h and, last, at h = 0."""
    return first_order([*STEPS, 0.0])


def falls(values: list[float], start: int = 2) -> list[float]:
    """By what factor a gap falls each time h halves, from h = STEPS[start] on; the last value, at h = 0, is left out."""
    return [a / b for a, b in itertools.pairwise(values[start:-1])]


def small_moe(seed: int = 1):
    """moe.py's transformer as a policy; log mu and e_mu of an engine that has the same weights in FP8."""
    policy = TinyMoE(*all_responses(4), seed)
    engine = copy.deepcopy(policy)
    with torch.no_grad():
        for p in engine.parameters():
            p.copy_(p.to(torch.float8_e4m3fn))
        logp_rollout, e_mu = engine()
    return policy, logp_rollout, e_mu


@torch.no_grad()
def update(policy, logp_old, size: float = 0.01):
    """One gradient step of MiniRL on all responses -> the moved policy; its live router has moved too."""
    policy, mask = copy.deepcopy(policy), policy.mask
    rewards = torch.rand(len(mask), generator=torch.Generator().manual_seed(0)).double()
    with torch.enable_grad():
        logp, _ = policy()
        loss.minirl_loss(logp, logp_old, logp_old, rewards, mask, denom=len(mask))[0].backward()
    for p in policy.parameters():
        p -= size * p.grad
    return policy


def flips(routes_a, routes_b, mask) -> int:
    """Inputs of response tokens at which some layer's set of experts differs."""
    inputs = mask.roll(-1, 1)
    return int(replay.agreement_counts(routes_a, routes_b, inputs)["flipped"])


# --- Eq. 1 to Eq. 4: two objectives, equal to first order


def test_eq_1_is_the_expected_reward_and_autograd_gives_eq_2_and_eq_4():
    """Claim: sum_y mu(y) sequence_weight(y) R(y) = E_pi[R] (Eq. 1); the gradients of J_seq and J_token are Eq. 2 and Eq. 4.

    Not luck: 63 responses of different length and random rewards, agreement to 1e-12, with each grad log pi(y_t) taken
    by itself. Catches a weight that is detached, averaged, or summed over masked positions.
    Mutation: _difference returns 0.9 (a - b), a tempered ratio: it obeys the first-order law below and is no pi/mu.
    """
    policy, _, logp_rollout, rewards, mask = perturbed(5)
    logp, _ = policy()
    mu, jac = logp_rollout.sum(-1).exp(), jacobian(policy)
    assert abs(mu.sum() - 1) < 1e-14 and abs(logp.sum(-1).exp().sum() - 1) < 1e-14
    ratio = (logp - logp_rollout).exp()  # (B, T), 1 where masked

    j_seq = (mu * loss.sequence_weight(logp, logp_rollout, mask) * rewards).sum()
    assert abs(j_seq - (logp.sum(-1).exp() * rewards).sum()) < 1e-14  # Eq. 1
    eq_2 = torch.einsum("b,bt,btn->n", mu * rewards * ratio.prod(-1), mask.double(), jac)
    close(gradient(j_seq, policy), eq_2)

    j_token = (mu * loss.token_weights(logp, logp_rollout, mask) * rewards).sum()
    assert abs(j_token - (mu * rewards * (ratio * mask).sum(-1)).sum()) < 1e-14  # Eq. 3
    eq_4 = torch.einsum("b,bt,btn->n", mu * rewards, ratio * mask, jac)
    close(gradient(j_token, policy), eq_4)
    assert (eq_2 - eq_4).norm() > 0.05 * eq_2.norm()  # away from mu they are two objectives


@pytest.mark.parametrize("policy", ["tabular", "MoE, replayed"])
@pytest.mark.parametrize("case", CASES)
def test_gap_of_objectives_is_second_order_and_gap_of_gradients_first_order(policy, case):
    """Claim: |J_seq - J_token - E_mu[(1 - |y|) R]| falls by 4 and |grad J_seq - grad J_token| by 2 as h halves.

    That is all "first order" means. prod(1 + d_t) - 1 - sum d_t is a sum of products d_s d_t, of order h^2; a gradient
    lowers the order by one, so the gradients agree at order 0 only: equal at pi = mu (checked to 1e-12), and apart
    linearly in h from there on, whether the engines differ, training has moved, or both. A surrogate that is right "to
    first order" is thus exact in its gradient on-policy and with equal engines alone.
    In the MoE the routes stay those of mu (R3), for only then is pi smooth in its weights; the next test takes that away.
    Not luck: nine halvings, six curves, exact sums. Catches a wrong constant or a weight that is not pi/mu.
    Mutation: the constant without its 1, -|y| R (the test above passes); pi/mu to the power 1.01 in token_weights.
    """
    gaps = enumerated()[policy][case]
    objective, grad = falls(gaps["objective"]), falls(gaps["gradient"])
    assert len(objective) == len(grad) == 9 and not any(gaps["flips"])
    assert all(3.6 < x < 4.4 for x in objective), objective
    assert all(1.8 < x < 2.2 for x in grad), grad
    assert gaps["h"][-1] == 0 and gaps["gradient"][-1] < 1e-12 and gaps["objective"][-1] < 1e-15
    assert gaps["size"][0] > 0.4  # of the largest |d_t| at h = 1: the path begins far from mu


@pytest.mark.parametrize("case", CASES)
def test_a_live_router_breaks_the_law_wherever_an_expert_flips(case):
    """Claim (Sec. 3): without replay the gap falls by 4 at exactly those halvings at whose ends no expert differs from mu's.

    A flipped expert makes some d_t a constant, whatever h: the gap of the gradients then stays (falls by about 1) and
    the gap of the objectives, d_s d_t with one of the two constant, falls by 2. In one number: the worst factor of ours
    is over 20 instead of 4. The law returns below the last flip, so nothing else is to blame.
    Not luck: the same weights, directions and steps obey the law under replay (test above). Catches a replay that is
    ignored, and an experiment in which nothing ever flips.
    Mutation: gaps replays whatever it is told (`experts if True else None`).
    """
    gaps = enumerated()["MoE, live"][case]
    flipped = gaps["flips"][:-1]
    last = max(i for i, n in enumerate(flipped) if n)
    assert last >= 6 and gaps["h"][last] <= 1 / 64  # flips reach small steps
    fall = falls(gaps["objective"], 0)
    broken = [not 3.6 < x < 4.4 for x in fall]
    assert all(broken[4 : last + 1]), fall  # and before them the higher orders are not small either
    assert not any(broken[last + 1 :]) and len(broken) > last + 2, fall
    assert max(fall[: last + 1]) > 20, fall
    plateau = falls(gaps["gradient"], 4)[: last - 4]
    assert max(plateau) < 1.5, plateau  # order 0: halving h no longer helps


# --- Eq. 5: two factors


def test_eq_5_holds_for_every_token_and_each_factor_is_1_where_it_should_be():
    """Claim (Eq. 5): weight of MiniRL = pi_old/mu * pi/pi_old per token, and a factor without a cause is 1, bit for bit.

    Not luck: each token of 63 responses to 1e-14, and in each case a factor that is not 1.
    Catches mu and pi_old swapped, a factor left out, and a discrepancy with the wrong sign.
    Mutation: is_correction=False drops the second factor in place of the first (weight / ratio).
    """
    for moved in CASES:
        policy, logp_old, logp_rollout, _, mask = perturbed(5, moved=moved)
        logp = policy()[0].detach()
        weight = token_weight(logp, logp_old, logp_rollout, mask)[mask]
        staleness = token_weight(logp, logp_old, logp_rollout, mask, is_correction=False)[mask]
        discrepancy = (logp_old - logp_rollout).exp()[mask]
        assert torch.allclose(weight, discrepancy * staleness, rtol=1e-14, atol=0)
        assert torch.allclose(weight, (logp - logp_rollout).exp()[mask], rtol=1e-14, atol=0)
        assert bool((staleness == 1).all()) == (moved == "discrepancy")
        assert bool((discrepancy == 1).all()) == (moved == "staleness")
        assert torch.equal(weight, staleness) == (moved == "staleness")  # equal engines


def test_eq_5_carries_the_experts_along_and_replay_repairs_its_factors():
    """Claim (Sec. 3): pi(e_pi)/mu(e_mu) is the product of two factors that each carry two routes; R3 repairs both, R2 one.

    The engine here has *equal weights and equal arithmetic* but other experts at some tokens, so any factor other than 1
    is routing alone. R3 makes the first factor exactly 1; replay on one side only makes the second one wrong.
    Not luck: bitwise equality, after asserting that routes and log-probs differ without replay.
    Catches pi and pi_old under different rules.
    Mutation: experts_for_pi_old gives None for R3 too (replay in one pass only).
    """
    policy, logp_fp8, e_mu = small_moe()
    mask = policy.mask
    with torch.no_grad():
        logp_old, e_old = policy()
        logp, e_pi = update(policy, logp_old)()
        assert flips(e_mu, e_old, mask) and flips(e_pi, e_old, mask)
        for logp_rollout in (logp_fp8, policy(e_mu)[0]):
            first, second = (logp_old - logp_rollout).exp(), (logp - logp_old).exp()
            weight = token_weight(logp, logp_old, logp_rollout, mask)
            assert torch.allclose(weight, first * second * mask, rtol=1e-14, atol=0)
            assert (first - 1).abs().max() > 0.01 and (second - 1).abs().max() > 0.01

        for mode in (
            "none",
            "R2",
            "R3",
        ):  # at theta = theta_old, against the engine that differs in its routes only
            old, recorded = policy(replay.experts_for_pi_old(mode, e_mu))
            new, _ = policy(replay.experts_for_pi(mode, e_mu, recorded))
            assert torch.equal(old, logp_rollout) == (mode == "R3"), mode
            assert torch.equal(new, old), mode
        one_sided, _ = policy(replay.experts_for_pi("R3", e_mu, e_old))
        assert (one_sided - logp_old).abs().max() > 0.01


# --- sampling


FLAGS = {
    "MiniRL": {},
    "w/o train-infer-IS": {"is_correction": False},
    "length-norm": {"length_norm": True},
}


@pytest.mark.parametrize("name", FLAGS)
def test_sampled_gradient_converges_at_the_monte_carlo_rate_to_what_the_formula_says(name):
    """Claim: the mean of minirl_loss gradients over n responses from mu is an unbiased estimate of Eq. 4; ablations are not.

    Exactly: E|g_n - g|^2 = Var/n with g and Var enumerated. For MiniRL g is grad J_token; without the first factor of
    Eq. 5 it is E[sum_t pi/pi_old R grad log pi], with length-norm E[1/|y| sum_t ...]: they converge as fast, elsewhere,
    and their distance from grad J_token is the enumerated one.
    Not luck: 200 repeats at three n over a factor of 256, the mean squared error within 20% of Var/n each time, a bias
    of over 20 standard errors for the ablations. Catches a wrong denominator, a weight that carries a
    gradient, a reward multiplied in twice.
    Mutation: length_norm divides by T instead of the response's length (of the three cases only length-norm fails).
    """
    policy, logp_old, logp_rollout, rewards, mask = perturbed(4, size=0.7)
    logp, mu, jac = policy()[0].detach(), logp_rollout.sum(-1).exp(), jacobian(policy)
    weight = {
        "MiniRL": (logp - logp_rollout).exp(),
        "w/o train-infer-IS": (logp - logp_old).exp(),
        "length-norm": (logp - logp_rollout).exp() / mask.sum(-1, keepdim=True),
    }
    each = {k: torch.einsum("b,bt,btn->bn", rewards, w * mask, jac) for k, w in weight.items()}
    target, expected = mu @ each["MiniRL"], mu @ each[name]  # grad J_token; what is to be found
    variance = mu @ each[name].pow(2).sum(-1) - expected.pow(2).sum()
    g, repeats = torch.Generator().manual_seed(0), 200
    for n in (8, 128, 2048):
        found = []
        for _ in range(repeats):
            i = mu.multinomial(n, replacement=True, generator=g)
            batch = policy()[0][i], logp_old[i], logp_rollout[i], rewards[i], mask[i]
            value, _ = loss.minirl_loss(*batch, denom=n, **OPEN, **FLAGS[name])
            found.append(-gradient(value, policy))
        found = torch.stack(found)  # (repeats, parameters)
        rate = (found - expected).pow(2).sum(-1).mean() * n / variance
        assert 0.8 < rate < 1.25, (n, rate)
    standard_error = (variance / n / repeats).sqrt()
    bias, found_bias = (expected - target).norm(), (found.mean(0) - target).norm()
    assert abs(found_bias - bias) < 3 * standard_error, (found_bias, bias, standard_error)
    assert (bias == 0) if name == "MiniRL" else (bias > 20 * standard_error), (bias, standard_error)


@pytest.mark.parametrize("G", [2, 3])
def test_the_group_mean_as_baseline_rescales_the_gradient_by_g_minus_1_over_g(G):
    """Claim: with A = R - mean of the group the expected gradient is (G - 1)/G grad J_token, whatever pi, pi_old and mu.

    A_i = (G - 1)/G R_i - 1/G sum of the others' R_j. The others are independent of y_i, and E_mu[pi/mu grad log pi] =
    sum over symbols of grad pi = 0, token by token: their part vanishes, and the factor is what R_i's own share of the
    mean takes away. The weight of Eq. 4 is needed for that zero: with pi/pi_old in its place, or with a division by
    |y|, which depends on what follows y_t, the baseline biases the gradient. Both are shown.
    Not luck: all 15^G groups, weighted by their probability, to 1e-12. Catches a mean over the batch instead of the
    group, a leave-one-out mean, a standard deviation.
    Mutation: group_advantages subtracts the mean of the whole batch (`group = group * 0`).
    """
    policy, logp_old, logp_rollout, rewards, mask = perturbed(3)
    count, mu, jac = len(mask), logp_rollout.sum(-1).exp(), jacobian(policy)
    groups = torch.cartesian_prod(*[torch.arange(count)] * G)  # (15^G, G)
    probability = mu[groups].prod(-1)
    rows, ids = groups.flatten(), torch.arange(len(groups)).repeat_interleave(G)
    adv = loss.group_advantages(rewards[rows], ids) * probability[ids]
    logp = policy()[0]

    def expected(adv, rows, denom, **flags):
        batch = logp[rows], logp_old[rows], logp_rollout[rows], adv, mask[rows]
        return -gradient(loss.minirl_loss(*batch, denom=denom, **OPEN, **flags)[0], policy)

    everything = torch.arange(count)
    weight = (logp - logp_rollout).exp().detach() * mask
    grad_j_token = torch.einsum("b,bt,btn->n", mu * rewards, weight, jac)
    close(expected(adv, rows, G), (G - 1) / G * grad_j_token)
    for flags in ({"is_correction": False}, {"length_norm": True}):
        without = expected(mu * rewards, everything, 1, **flags)
        off = (expected(adv, rows, G, **flags) - (G - 1) / G * without).norm() / without.norm()
        assert off > 0.02, (flags, off)


# --- the mask and the cap


def test_the_mask_asks_pi_old_and_the_weight_asks_mu():
    """Claim (Sec. 4.1): six tokens, both signs of A, by hand; then a pair where confusing pi_old and mu flips M_t.

    Not luck: exact numbers, of which each is wrong under some confusion of cap, mask and ratio. Catches all of those.
    Mutation: _factors returns the weight as the ratio too, so that the mask asks how far pi is from mu.
    """
    old, mu, ratio = torch.tensor(
        [[0.5] * 6, [0.5, 0.25, 0.05, 0.5, 0.5, 0.1], [1, 1, 1, 1.5, 0.5, 1.25]]
    ).double()
    logs = [z.log()[None] for z in (old * ratio, old, mu)]
    mask = torch.ones(1, 6, dtype=torch.bool)
    # weight = ratio * old / mu = 1 2 10->5 1.5 .5 6.25->5
    for a, right in ((1.0, [-1, -2, -5, 0, -0.5, -5]), (-1.0, [1, 2, 5, 1.5, 0, 5])):
        adv, right = torch.tensor([a]).double(), torch.tensor(right).double()
        found = token_gradient(loss.minirl_loss, *logs, adv, mask, is_cap=5.0, **EPS)
        assert torch.allclose(found[0], right, rtol=1e-6), found  # mu = .05 is rounded

    # Token 1: pi has left pi_old upwards (r = 1.5) but equals mu. Token 2: pi = pi_old, but 1.5 mu. A = 1.
    logs = [torch.tensor([z]).double().log() for z in ([0.6, 0.6], [0.4, 0.6], [0.6, 0.4])]
    adv, right = torch.ones(1).double(), torch.tensor([[0.0, -1.5]]).double()
    found = token_gradient(loss.minirl_loss, *logs, adv, right < 1, **EPS)
    assert torch.allclose(found, right, rtol=1e-6), found


def test_the_mask_at_every_corner_of_sign_and_ratio():
    """Claim (Sec. 4.1): M_t = 0 only where A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low; clip=False: nowhere.

    Not luck: each bound from both sides, 0.01 apart, three signs of A; statistics count the same tokens.
    Catches swapped epsilons, a two-sided mask, a mask where A = 0.
    Mutation: too_low compares with 1 - eps_high.
    """
    ratio = torch.tensor([[0.5, 0.79, 0.81, 1.0, 1.26, 1.28, 2.0]]).double()
    table = {  # A -> M_t
        1.0: [1, 1, 1, 1, 1, 0, 0],
        -1.0: [0, 0, 1, 1, 1, 1, 1],
        0.0: [1, 1, 1, 1, 1, 1, 1],
    }
    old, mask = torch.full_like(ratio, -3.0), torch.ones(1, 7, dtype=torch.bool)
    for (a, keep), clip in itertools.product(table.items(), (True, False)):
        adv, keep = torch.tensor([a]).double(), torch.tensor([keep if clip else [1] * 7]).double()
        batch = old + ratio.log(), old, old, adv, mask
        found = token_gradient(loss.minirl_loss, *batch, is_cap=math.inf, clip=clip, **EPS)
        assert torch.allclose(found, -a * keep * ratio, rtol=1e-12), (a, found)
        stats = loss.minirl_loss(*batch, denom=1, clip=clip, **EPS)[1]
        high, low = (round(float(stats[f"clip_frac_{k}"]) * 7) for k in ("high", "low"))
        assert (high, low) == {1.0: (2, 0), -1.0: (0, 2), 0.0: (0, 0)}[a]


# --- Appendix A


def in_a_loop(kind: str, logp, logp_old, logp_rollout, adv, mask, cap: float):
    """The three objectives as the paper writes them, token by token; to be maximized, divided by their own normalizer."""
    total, low, high = 0.0, 1 - EPS["eps_low"], 1 + EPS["eps_high"]
    for b in range(len(mask)):
        response = 0.0
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            live = (logp[b, t] - logp_old[b, t]).exp()
            r, a = live.item(), adv[b].item()
            if kind == "minirl":
                keep = not (a > 0 and r > high) and not (a < 0 and r < low)
                weight = min(math.exp(logp[b, t].item() - logp_rollout[b, t].item()), cap)
                response += keep * weight * a * logp[b, t]
            elif kind == "cispo":
                response += min(max(r, low), high) * a * logp[b, t]
            elif kind == "grpo":
                response += min(live * a, live.clamp(low, high) * a)
            else:
                pytest.fail(f"no formula of {kind} here: add it")
        total += response / mask[b].sum() if kind == "grpo" else response
    return total / (mask.sum() if kind == "cispo" else len(mask))


@pytest.mark.parametrize("kind", loss.OBJECTIVES)
def test_objectives_equal_their_formulas_in_a_double_loop(kind):
    """Claim (Sec. 4.1, Appendix A): value and gradient of each objective equal its formula written out token by token.

    Not luck: ragged masks, garbage at masked positions, ratios from 0.3 to 3, weights over the cap, advantages of both
    signs. Catches a wrong normalizer (GRPO by response, CISPO by token), max for min, a clip with a gradient.
    Mutation: grpo_loss takes torch.maximum (caught here as grpo); cispo_loss without the clamp (here as cispo).
    """
    objective, counts, _ = loss.OBJECTIVES[kind]
    logp, logp_old, logp_rollout, adv, mask = random_batch()
    assert ((logp - logp_rollout).exp()[mask] > 1.5).any() and (mask.sum(-1).unique().numel()) > 2
    garbage = [z.masked_fill(~mask, math.nan) for z in (logp, logp_old, logp_rollout)]
    denom = {"responses": len(mask), "tokens": int(mask.sum())}[counts]
    leaf = logp.clone().requires_grad_()
    right = in_a_loop(kind, leaf, logp_old, logp_rollout, adv, mask, cap=1.5)
    value, _ = objective(*garbage, adv, mask, denom=denom, is_cap=1.5, **EPS)
    assert abs(value + right) < 1e-13, (value, right)
    found = token_gradient(objective, *garbage, adv, mask, denom=denom, is_cap=1.5, **EPS)
    close(found, -torch.autograd.grad(right, leaf)[0])


def test_where_minirl_grpo_and_cispo_coincide_and_where_they_part():
    """Claim (Appendix A): on-policy and with equal engines the three gradients differ by the normalizer alone; then:

        lengths differ        GRPO alone reweights responses, by 1/|y|
        mu != pi_old          MiniRL alone has the factor pi_old/mu
        pi != pi_old          MiniRL = |y| GRPO still (its mask is what min does to the gradient); CISPO keeps the
                              masked tokens, with the clipped weight, and clips where A pushes back
    Not luck: equality to 1e-12 and each difference token by token. Catches a mask that is not PPO's, or GRPO and CISPO
    that use mu.
    Mutation: cispo_loss uses the weight pi/mu in place of pi/pi_old.
    """
    logp, logp_old, logp_rollout, adv, mask = random_batch()
    tokens, length = int(mask.sum()), mask.sum(-1, keepdim=True)
    assert length.unique().numel() > 2

    def three(*policies):
        grads = [
            token_gradient(objective, *policies, adv, mask, is_cap=math.inf, **EPS)
            for objective in (loss.minirl_loss, loss.grpo_loss, loss.cispo_loss)
        ]
        return grads[0], grads[1] * length, grads[2]  # denom 1; GRPO's own 1/|y| undone

    assert tokens != len(mask)
    minirl, grpo, cispo = three(logp, logp, logp)
    close(grpo, minirl)
    close(cispo, minirl)
    minirl, grpo, cispo = three(logp, logp, logp_rollout)  # the engines differ
    close(grpo, cispo)
    close(minirl, grpo * (logp - logp_rollout).exp())
    assert (minirl - grpo).norm() > 0.1 * grpo.norm()
    minirl, grpo, cispo = three(logp, logp_old, logp_old)  # training has moved
    close(grpo, minirl)
    r, a = (logp - logp_old).exp(), adv[:, None] * mask
    masked = ((a > 0) & (r > 1.27)) | ((a < 0) & (r < 0.8))
    assert masked.any() and not minirl[masked].any() and cispo[masked].all()
    close(cispo, -a * r.clamp(0.8, 1.27))
    inside = (r > 0.8) & (r < 1.27) & mask
    assert torch.allclose(cispo[inside], minirl[inside], rtol=1e-12)
    pushed_back = ~masked & ~inside & (a != 0)
    assert pushed_back.any() and (cispo != minirl)[pushed_back].all()


# --- MoE: Table 1, the router's gradient, amplification


def test_table_1_which_target_policy_replay_optimizes():
    """Claim (Table 1): R2 optimizes pi itself on the first mini-batch and another policy after an update; R3 from the start.

    Not luck: equality is bit for bit over all responses, and the differences are of log-probs, at tokens whose experts
    were asserted to differ. Catches R2 that records mu's experts, R3 that falls back to the live router.
    Mutation: experts_for_pi gives R2 the rollout's experts.
    """
    policy, _, e_mu = small_moe()
    mask = policy.mask
    with torch.no_grad():
        logp_old, e_old = policy(replay.experts_for_pi_old("R2", e_mu))
        for number, pi in (("first", policy), ("second", update(policy, logp_old))):
            live, e_pi = pi()
            for mode in ("R2", "R3"):
                target, _ = pi(replay.experts_for_pi(mode, e_mu, e_old))
                if (mode, number) == ("R2", "first"):
                    assert torch.equal(target, live) and torch.equal(e_pi, e_old)
                else:
                    assert (target - live).abs().max() > 0.01, (mode, number)
        assert flips(e_pi, e_old, mask) and flips(e_pi, e_mu, mask) and flips(e_old, e_mu, mask)


def test_replaying_a_models_own_routes_changes_nothing_and_other_routes_do():
    """Claim (Sec. 3): replay fixes the choice and nothing else: own routes give the same bits, forward and gradient.

    The router's gradient included, since gates come from the live logits; other experts change the log-probs from the
    token on that used them, and none before (experts[b, t] serve token t as input).
    Not luck: bitwise on 31 responses. Catches gates that are recorded or renormalized twice, routes off by one.
    Mutation: MoE.forward sorts the replayed experts by id (other bits); it detaches p when replay is given.
    """
    policy, _, _ = small_moe()
    rewards = torch.arange(len(policy.mask)).double()
    logp, routes = policy()
    again, used = policy(routes)
    assert torch.equal(logp, again) and torch.equal(routes, used)
    grads = [gradient((z * rewards[:, None]).sum(), policy) for z in (logp, again)]
    assert torch.equal(*grads)
    changed = routes.clone()
    changed[:, 2, 1, 0] = (routes[:, 2, 1].max(-1).values + 1) % TINY["num_experts"]
    long = policy.mask[:, 3]
    other = (policy(changed)[0] != logp)[long]
    assert other[:, 3].all() and not other[:, :3].any()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_routers_gradient_under_replay_is_the_one_derived_by_hand(normalize):
    """Claim (Sec. 3): given experts e, d<c, y>/d z_j for router logits z, y = sum_{i in e} g_i f_i(x), is

        gates renormalized over e (g = softmax of z over e):   g_j (<c, f_j> - <c, y>) for j in e, 0 elsewhere
        gates not renormalized (g_i = p_i, over all E):        p_j ([j in e] <c, f_j> - <c, y>) for every j

    from the softmax's Jacobian d g_i/d z_j = g_i (delta_ij - g_j); times x it is the gradient of W_r. So the router
    learns under replay, but no renormalized gate moves an expert outside e.
    Not luck: 1e-12, random experts that the router did not choose. Catches detached gates, gates of the router's own
    choice under replayed experts, renormalization with a detached denominator.
    Mutation: the gates are divided by g.sum(...).detach().
    """
    g = torch.Generator().manual_seed(0)
    config = moe.MoEConfig.from_dict(TINY | {"norm_topk_prob": normalize})
    layer = moe.MoE(config).double()
    for p in layer.parameters():
        p.data.normal_(0, 0.5, generator=g)
    x, c = torch.randn(2, 6, config.hidden_size, generator=g, dtype=torch.float64)
    e = torch.stack([torch.randperm(config.num_experts, generator=g)[:2] for _ in x])
    y, used, live = layer(x, e)
    assert torch.equal(used, e) and (live.sort().values != e.sort().values).any()
    (c * y).sum().backward()

    right = torch.zeros_like(layer.gate.weight)
    for s in range(len(x)):
        z = layer.gate.weight.detach() @ x[s]
        p = z.exp() / (z[e[s]].exp().sum() if normalize else z.exp().sum())
        value = {}  # expert -> <c, f_i(x)>
        for i in e[s].tolist():
            gate, up = (layer.experts.gate_up_proj[i].detach() @ x[s]).chunk(2)
            out = layer.experts.down_proj[i].detach() @ (gate * torch.sigmoid(gate) * up)
            value[i] = (c[s] @ out).item()
        mean = sum(p[i] * v for i, v in value.items())  # <c, y>
        for j in value if normalize else range(config.num_experts):
            right[j] += p[j] * (value.get(j, 0.0) - mean) * x[s]
    close(layer.gate.weight.grad, right)
    assert right.norm() > 0.1


def test_a_flipped_expert_moves_log_probs_far_more_than_rounding():
    """Claim (Sec. 3): one swapped expert (the K-th for the K+1-th, in one layer) moves log pi more than bf16 in all layers.

    bf16 means weights, activations and everything else, under the same routes. The weights are random and keep the size
    of activations (std 1/sqrt(D)); the ratio is about 17. It is no law: with std 0.02 experts contribute nothing at
    this width and the ratio is 0.2, and on responses sampled from the trained toy of cold_start.py, whose K-th gate is
    0.1 and whose tokens are mostly certain, it is 0.6 to 1.6, a layer at a time.
    Not luck: means over 24 tokens x 4 layers against the rounding of the same tokens, and a bound of 3. Catches a
    replay that is ignored.
    Mutation: MoE.forward uses the live experts whatever is given.
    """
    shape = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_experts": 16}
    shape |= {"head_dim": 32, "moe_intermediate_size": 32, "max_position_embeddings": 64}
    model = moe.MoETransformer(moe.MoEConfig.from_dict(TINY | shape))
    init_weights(model, 0, std=0.125)
    B, T, K = 4, 53, model.config.num_experts_per_tok
    tokens = torch.randint(0, 128, (B, T), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logprobs(model, experts=None):
        hidden, experts = model(tokens, experts=experts)
        return model.logprobs(hidden[:, :-1], tokens[:, 1:])[0], experts

    scores = []  # router logits, a layer at a time: moe.py returns the chosen experts only
    for layer in model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, x, y: scores.append(y.view(B, T, -1)))
    exact, routes = logprobs(model)
    runner_up = torch.stack(scores, 2).argsort(-1, descending=True)[..., K]  # (B, T, L)
    rounded, _ = logprobs(copy.deepcopy(model).bfloat16(), routes)
    places, flip = [5, 14, 23, 32, 41, 50], []
    for t, layer in itertools.product(places, range(len(model.layers))):
        swapped = routes.clone()
        swapped[:, t, layer, -1] = runner_up[:, t, layer].to(routes.dtype)
        flip.append((logprobs(model, swapped)[0] - exact)[:, t])
    flip, rounding = torch.cat(flip).abs().mean(), (rounded - exact)[:, places].abs().mean()
    print(f"one expert flipped {flip:.1e}, bf16 {rounding:.1e} nats: {flip / rounding:.1f} times")
    assert flip > 3 * rounding > 0, (flip, rounding)


# --- what the argument neglects, as a number


def test_first_order_gap_equals_the_direct_product_and_survives_long_responses():
    """Claim: first_order_gap = |prod(1 + d_t) - 1 - sum d_t|, exact for tiny d_t and finite for 32,768 huge ratios.

    Not luck: rational arithmetic for d = 1e-9, where a direct product in float64 is off by all of its digits.
    Catches 1 + d - 1 cancelling, overflow to inf or NaN, masked positions taking part.
    Mutation: the gap is computed from exp() - 1 in place of expm1() (the tiny case); no clamp of the sum (the long one).
    """
    logp, _, logp_rollout, _, mask = random_batch()
    ratio = (logp - logp_rollout).exp()
    direct = [abs(r[m].prod() - 1 - (r[m] - 1).sum()) for r, m in zip(ratio, mask, strict=True)]
    found = loss.first_order_gap(logp.masked_fill(~mask, math.nan), logp_rollout, mask)
    assert torch.allclose(found, torch.stack(direct), rtol=1e-12, atol=1e-15)

    log_d = torch.tensor([[1e-9, 2e-9, -3e-9]], dtype=torch.float64)
    one_plus_d = [
        sum(Fraction(x) ** k / math.factorial(k) for k in range(6)) for x in log_d[0].tolist()
    ]
    exact = float(abs(math.prod(one_plus_d) - 1 - sum(x - 1 for x in one_plus_d)))  # 7e-18
    zero, all_of = torch.zeros_like(log_d), torch.ones(1, 3, dtype=torch.bool)
    assert abs(loss.first_order_gap(log_d, zero, all_of).item() / exact - 1) < 1e-6

    T = 32_768
    base, mask = torch.full((6, T), -1.0), torch.ones(6, T, dtype=torch.bool)
    shift = torch.tensor([0.0, 0.1, -0.1, 50.0, -50.0, 1e4])[:, None].expand(6, T)
    gap = loss.first_order_gap(base + shift, base, mask)
    assert gap.isfinite().all() and gap[0] == 0 and (gap[1:] > 1e3).all(), gap
    assert loss.sequence_weight(base + shift, base, mask).isfinite().all()
    assert loss.token_weights(base + shift, base, mask).isfinite().all()
    # row 2: the product is 0, and -1 - T (e^-.1 - 1) = 32768 * 0.0951626 - 1
    assert abs(gap[2] - (-T * math.expm1(-0.1) - 1)) < 1e-2


# --- the text


def test_every_equation_of_a_docstring_stands_at_a_line_of_code():
    """Claim: "Eq. 1" to "Eq. 5" of loss.py's module docstring each stand in a comment after code, and no others do.

    replay.py's docstring shares Eq. 5, which loss.py realizes, so its tags are looked up in both files.
    Not luck: comments are found by the tokenizer, and those without code on their line do not count. Catches a doc
    equation that its code left behind.
    Mutation: the tag "Eq. 2" removed from loss.py's docstring (a line of code then names an equation nobody states);
    removed from sequence_weight's comment instead.
    """
    written, realized = {}, {}
    for module in (loss, replay):
        source = Path(module.__file__).read_text()
        written[module] = set(re.findall(r"Eq\. (\d)", module.__doc__))
        comments = [
            token.string
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and token.line.split("#")[0].strip()
        ]
        realized[module] = set(re.findall(r"Eq\. (\d)", " ".join(comments)))
        assert realized[module] <= written[module], module
    assert written[loss] == realized[loss] == set("12345")
    assert written[replay] <= realized[loss] | realized[replay]
