"""Why a token-level objective may stand in for the sequence-level reward, and the objective that follows: MiniRL.

A prompt x is answered by a response y = (y_1 .. y_|y|), which earns one reward R(x, y). Three policies give log-probs
for the same tokens; they are never mixed (where it is clear, mu is short for mu_old):

    logp_rollout   mu_old   the weights theta_old in the inference engine (vLLM), which sampled y
    logp_old       pi_old   the same theta_old in the training engine
    logp           pi       the weights theta being trained, in the training engine; the only one with a gradient

What we want is the expected reward of pi. With samples of mu_old, by importance sampling:

    J_seq(theta)    = E_{x, y~mu_old} [ pi(y|x)/mu_old(y|x) R(x, y) ]                                  Eq. 1
    grad J_seq      = E [ pi(y|x)/mu_old(y|x) R(x, y) sum_t grad log pi(y_t) ]                         Eq. 2

The weight is a product over all tokens: for thousands of them its range and variance are hopeless. The way out is

    J_token(theta)  = E_{x, y~mu_old} [ sum_t pi(y_t)/mu_old(y_t) R(x, y) ]                            Eq. 3
    grad J_token    = E [ sum_t pi(y_t)/mu_old(y_t) R(x, y) grad log pi(y_t) ]                         Eq. 4

Write pi(y_t)/mu_old(y_t) = 1 + d_t. Since prod_t (1 + d_t) = 1 + sum_t d_t + O(d^2), J_token equals J_seq to first
order in d, up to E_mu[(1 - |y|) R], which does not depend on theta. First order in the objective is zeroth order in
the gradient: the two gradients are equal at pi = mu_old, and their gap grows linearly in d. So everything hangs on
every d_t being small, and two independent causes make it large:

    pi(y_t)/mu_old(y_t) = pi_old(y_t)/mu_old(y_t)  *  pi(y_t)/pi_old(y_t)                              Eq. 5
                          training-inference          policy staleness
                          discrepancy

The first is fought by making the engines agree (replay.py's R3), the second by clipping (below), R2 and R3. The weight
cures neither: Eq. 4 demands it, since mu_old sampled y, and with pi/pi_old in its place the objective is another.

    MiniRL (Sec. 4.1):  J = E [ sum_t M_t sg[pi(y_t)/mu_old(y_t)] A(x, y) log pi(y_t) ],   r_t = pi(y_t)/pi_old(y_t)
        A    R minus the mean reward of the group of responses to x; no division by the standard deviation
        M_t  0 if (A > 0 and r_t > 1 + eps_high) or (A < 0 and r_t < 1 - eps_low), else 1. It asks how far *training*
             has moved, hence pi_old (decoupled PPO), while the weight corrects the *sampling*, hence mu_old
        sg   stop-gradient. The weight is capped (truncated importance sampling): less variance, at some bias

There is no division by the response length: Eq. 4 has a sum over tokens, and a mean would be another objective.

Shapes: B responses, T positions. Log-probs and mask are (B, T), adv and rewards (B,); index t holds the quantity of
token t of prompt + response, and mask is true on response tokens. What stands at masked positions is ignored, NaN and
infinities too. Left out: a KL penalty to a reference model and an entropy bonus, which the paper does not use.
"""

import torch
from torch import Tensor

Stats = dict[str, Tensor]  # 0-d, detached: "tokens" is a count, "..._max" maxima, the rest means


def sequence_weight(logp: Tensor, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """pi(y|x)/mu_old(y|x), a product over the response tokens: (B, T) x 3 -> (B,) float64, finite.

    Times R and averaged over samples of mu_old it is J_seq; differentiating it gives Eq. 2.
    """
    log_weight = _difference(logp, logp_rollout, mask).sum(-1)
    return log_weight.clamp(max=700).exp()  # Eq. 1, Eq. 2; float64 ends at e^709


def token_weights(logp: Tensor, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """sum_t pi(y_t)/mu_old(y_t) over the response tokens: (B, T) x 3 -> (B,) float64, finite.

    Times R and averaged over samples of mu_old it is J_token; differentiating it gives Eq. 4.
    """
    weight = _difference(logp, logp_rollout, mask).clamp(max=600).exp()
    return (weight * mask).sum(-1)  # Eq. 3, Eq. 4


def first_order_gap(logp: Tensor, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """|prod_t (1 + d_t) - (1 + sum_t d_t)| of each response, 1 + d_t = pi/mu_old: (B, T) x 3 -> (B,) float64.

    What the first-order argument neglects. Computed from expm1 so that tiny d do not cancel, and bounded by about
    e^700, so that a response of 32,768 tokens gives a large number and never a NaN.
    """
    log_weight = _difference(logp, logp_rollout, mask).clamp(-600, 600)
    product = log_weight.sum(-1).clamp(max=700).expm1()  # prod_t (1 + d_t) - 1, Eq. 1
    return (product - log_weight.expm1().sum(-1)).abs()  # minus sum_t d_t, Eq. 3


def group_advantages(rewards: Tensor, group_ids: Tensor, std_norm: bool = False) -> Tensor:
    """A = R - mean of R over the responses with the same id: (B,), (B,) int -> (B,) in the dtype of rewards.

    std_norm divides by the group's (population) standard deviation, as GRPO does. A group whose rewards are all equal
    gets exactly 0 either way.
    """
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    rewards = rewards.double()
    _, group = group_ids.unique(return_inverse=True)  # (B,) 0 .. number of groups - 1
    zeros = rewards.new_zeros(len(rewards))

    def over_group(values: Tensor, reduce: str) -> Tensor:
        return zeros.scatter_reduce(0, group, values, reduce, include_self=False)[group]  # (B,)

    adv = rewards - over_group(rewards, "mean")
    if std_norm:
        adv = adv / over_group(adv**2, "mean").sqrt()
    equal = over_group(rewards, "amax") == over_group(rewards, "amin")
    return adv.masked_fill(equal, 0.0).to(dtype)


def minirl_loss(
    logp: Tensor,
    logp_old: Tensor,
    logp_rollout: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    denom: float,
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    is_cap: float = 5.0,
    is_correction: bool = True,
    clip: bool = True,
    length_norm: bool = False,
) -> tuple[Tensor, Stats]:
    """-J_MiniRL of these responses (Sec. 4.1); `denom` is the number of responses in the whole mini-batch.

    Summed over micro-batches and ranks it is minus the mean over responses, however they were split. Ablations of the
    paper: is_correction=False drops the first factor of Eq. 5, clip=False sets M = 1, length_norm=True divides each
    response's sum by its length. Returns the loss (0-d, gradient through logp only) and Stats.
    """
    ratio, weight = _factors(logp, logp_old, logp_rollout, mask)
    too_high, too_low = _clipped(ratio, adv, mask, eps_low, eps_high)
    keep = ~(too_high | too_low) if clip else torch.ones_like(mask)  # M_t
    w = weight if is_correction else ratio  # Eq. 5; w/o train-infer-IS its second factor alone
    coefficient = keep * w.clamp(max=is_cap) * adv[:, None]
    # The gradient of this is Eq. 4, with A for R, masked and capped.
    per_token = coefficient * logp.masked_fill(~mask, 0.0)
    if length_norm:
        per_token = per_token / mask.sum(-1, keepdim=True).clamp(min=1)
    loss = -per_token.sum() / denom
    return loss, _stats(ratio, weight, too_high, too_low, mask, is_cap)


def grpo_loss(
    logp, logp_old, logp_rollout, adv, mask, *, denom, eps_low=0.2, eps_high=0.27, is_cap=5.0
) -> tuple[Tensor, Stats]:
    """-J_GRPO (Appendix A): the mean over a response of min(r_t A, clip(r_t) A), averaged over `denom` responses.

    Arguments as in minirl_loss; r_t = pi/pi_old carries the gradient. mu_old does not appear: logp_rollout and is_cap
    serve the statistics alone. Pass advantages made with std_norm=True.
    """
    ratio, weight = _factors(logp, logp_old, logp_rollout, mask)
    too_high, too_low = _clipped(ratio, adv, mask, eps_low, eps_high)
    r = (logp - logp_old).masked_fill(~mask, 0.0).exp()  # r_t with its gradient
    per_token = torch.minimum(r * adv[:, None], r.clamp(1 - eps_low, 1 + eps_high) * adv[:, None])
    per_response = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -per_response.sum() / denom, _stats(ratio, weight, too_high, too_low, mask, is_cap)


def cispo_loss(
    logp, logp_old, logp_rollout, adv, mask, *, denom, eps_low=0.2, eps_high=0.27, is_cap=5.0
) -> tuple[Tensor, Stats]:
    """-J_CISPO (Appendix A): sum_t sg[clip(r_t)] A log pi(y_t), no token masked, over `denom` response *tokens*.

    Arguments as in minirl_loss. r_t = pi/pi_old; mu_old does not appear. Pass advantages made with std_norm=True.
    """
    ratio, weight = _factors(logp, logp_old, logp_rollout, mask)
    too_high, too_low = _clipped(ratio, adv, mask, eps_low, eps_high)
    w = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = -(w * adv[:, None] * logp.masked_fill(~mask, 0.0)).sum() / denom
    return loss, _stats(ratio, weight, too_high, too_low, mask, is_cap)


# name -> (objective, what its `denom` counts over the whole mini-batch, are advantages divided by the deviation).
# An objective takes what grpo_loss takes, more where it likes, and returns a 0-d loss, whose gradient goes through logp
# alone, and _stats(...). A response without response tokens adds 0 to it, whatever its adv: ranks pad with such.
OBJECTIVES = {
    "minirl": (minirl_loss, "responses", False),
    "grpo": (grpo_loss, "responses", True),
    "cispo": (cispo_loss, "tokens", True),
}


def kl_rollout_train(
    logp_rollout: Tensor, logp_old: Tensor, mask: Tensor, estimator: str = "k1"
) -> Tensor:
    """KL[mu_old || pi_old] per token in nats, estimated on tokens sampled from mu_old -> 0-d float64.

    "k1" is the paper's, the mean of log mu_old - log pi_old: unbiased, noisy, of either sign. "k3" is the mean of
    q - 1 - log q with q = pi_old/mu_old: the same expectation, never negative, far less noise.
    """
    log_q = _difference(logp_old, logp_rollout, mask)
    per_token = {"k1": -log_q, "k3": log_q.clamp(max=600).expm1() - log_q}[estimator]
    return per_token.sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def discrepancy_stats(
    logp_old: Tensor, logp_rollout: Tensor, entropy: Tensor, mask: Tensor
) -> Stats:
    """The first factor of Eq. 5 and the entropy of pi, as Stats."""
    difference = _difference(logp_old, logp_rollout, mask).abs()
    tokens = mask.sum().double()
    return {
        "tokens": tokens,
        "kl_rollout_train": kl_rollout_train(logp_rollout, logp_old, mask),
        "kl_rollout_train_k3": kl_rollout_train(logp_rollout, logp_old, mask, "k3"),
        "logp_diff_mean": difference.sum() / tokens.clamp(min=1),
        "logp_diff_max": difference.amax(),
        "entropy": entropy.double().masked_fill(~mask, 0.0).sum() / tokens.clamp(min=1),
    }


def merge_stats(parts: list[Stats]) -> Stats:
    """The Stats of a mini-batch from its micro-batches' on all ranks: a sum of tokens, maxima, means over tokens."""
    tokens = torch.stack([p["tokens"] for p in parts])
    merged = {"tokens": tokens.sum()}
    for name in parts[0].keys() - {"tokens"}:
        values = torch.stack([p[name] for p in parts])
        mean = (values * tokens).sum() / tokens.sum().clamp(min=1)
        merged[name] = values.amax() if name.endswith("_max") else mean
    return merged


def _difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """a - b in float64, 0 where masked (even if a or b is infinite or NaN there)."""
    return a.double().masked_fill(~mask, 0.0) - b.double().masked_fill(~mask, 0.0)


def _factors(logp: Tensor, logp_old: Tensor, logp_rollout: Tensor, mask: Tensor):
    """Without gradient: pi/pi_old and pi/mu_old (B, T), 1 where masked.

    The second is made of the two factors of Eq. 5, so that it is the first, bit for bit, where the engines agree.
    """
    logp, logp_old, logp_rollout = (
        z.detach().masked_fill(~mask, 0.0) for z in (logp, logp_old, logp_rollout)
    )
    discrepancy, staleness = logp_old - logp_rollout, logp - logp_old
    return staleness.exp(), (discrepancy + staleness).exp()  # r_t; Eq. 5


def _clipped(ratio: Tensor, adv: Tensor, mask: Tensor, eps_low: float, eps_high: float):
    """Tokens that training has already moved past the trust region in the direction in which A pushes: two (B, T)."""
    too_high = (adv[:, None] > 0) & (ratio > 1 + eps_high) & mask
    too_low = (adv[:, None] < 0) & (ratio < 1 - eps_low) & mask
    return too_high, too_low


@torch.no_grad()
def _stats(ratio, weight, too_high, too_low, mask, is_cap) -> Stats:
    tokens = mask.sum().double()

    def mean(z: Tensor) -> Tensor:
        return (z.double() * mask).sum() / tokens.clamp(min=1)

    return {
        "tokens": tokens,
        "clip_frac_high": mean(too_high),
        "clip_frac_low": mean(too_low),
        "ratio_max": (ratio * mask).amax(),
        "is_weight_mean": mean(weight),
        "is_weight_max": (weight * mask).amax(),
        "is_capped_frac": mean(weight > is_cap),
    }
