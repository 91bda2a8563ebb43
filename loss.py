"""Why a token-level objective may stand in for the sequence-level reward; and what follows: MiniRL.

A response y = (y_1 .. y_|y|) to a prompt x earns one reward R(x, y). Three policies give log-probs
for the same tokens. They are never mixed (where it is clear, mu is short for mu_old):

    logp_rollout   mu_old   the weights theta_old in the inference engine (vLLM), which sampled y
    logp_old       pi_old   the same theta_old in the training engine
    logp           pi       the weights theta being trained, in the training engine; it alone has a
                            gradient

What we want is the expected reward of pi. With samples of mu_old, by importance sampling:

    J_seq(theta)    = E_{x, y~mu_old} [ pi(y|x)/mu_old(y|x) R(x, y) ]                          Eq. 1
    grad J_seq      = E [ pi(y|x)/mu_old(y|x) R(x, y) sum_t grad log pi(y_t) ]                 Eq. 2

The weight is a product over all tokens: for thousands of them its range and variance are hopeless.
The way out is

    J_token(theta)  = E_{x, y~mu_old} [ sum_t pi(y_t)/mu_old(y_t) R(x, y) ]                    Eq. 3
    grad J_token    = E [ sum_t pi(y_t)/mu_old(y_t) R(x, y) grad log pi(y_t) ]                 Eq. 4

Write pi(y_t)/mu_old(y_t) = 1 + d_t. Since prod_t (1 + d_t) = 1 + sum_t d_t + O(d^2), J_seq equals
J_token + E_mu[(1 - |y|) R] to first order in d, and the term that is added does not depend on
theta. The objectives differ at second order in d, so their gradients differ at first order and are
equal at pi = mu_old. So everything depends on small d_t, and two independent causes make them
large:

    pi(y_t)/mu_old(y_t) = pi_old(y_t)/mu_old(y_t)  *  pi(y_t)/pi_old(y_t)                      Eq. 5
                          training-inference          policy staleness
                          discrepancy

Engines that agree keep the first factor near 1 (replay.py's R3). Clipping, R2 and R3 keep the
second near 1. The importance weight makes no d_t small: it is part of the gradient, Eq. 4, because
mu_old sampled y. With pi/pi_old in its place the objective is another one.

    MiniRL (Sec. 4.1):  J = E [ sum_t M_t sg[pi(y_t)/mu_old(y_t)] A(x, y) log pi(y_t) ]
        r_t  pi(y_t)/pi_old(y_t)
        M_t  0 if (A > 0 and r_t > 1 + eps_high) or (A < 0 and r_t < 1 - eps_low), else 1. It asks
             how far *training* has moved, hence pi_old (decoupled PPO). The weight corrects the
             *sampling*, hence mu_old
        A    R minus the mean reward of the responses to x; no division by the standard deviation
        sg   stop-gradient
        eps_low, eps_high, and is_cap, the weight's upper limit (truncated importance sampling):
             less variance, some bias

There is no division by the response length: Eq. 4 has a sum over tokens. A mean would be another
objective.

Shapes: B responses, T positions. Log-probs and mask are (B, T), adv and rewards (B,). Index t holds
the quantity of token t of prompt + response; mask is true on response tokens. What stands at masked
positions is ignored, NaN and infinities too. Left out: a KL penalty to a reference model and an
entropy bonus, which the paper does not use.
"""

import torch
from torch import Tensor

Stats = dict[str, Tensor]  # 0-d, detached: "tokens" is a count, "..._max" maxima, the rest means


def sequence_weight(logp: Tensor, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """pi(y|x)/mu_old(y|x), the product over response tokens: three (B, T) -> (B,) float64, finite.

    Times R and averaged over samples of mu_old it is J_seq. Its derivative gives Eq. 2.
    """
    log_weight = _difference(logp, logp_rollout, mask).sum(-1)
    return log_weight.clamp(max=700).exp()  # Eq. 1, Eq. 2; float64 ends at e^709


def token_weights(logp: Tensor, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """sum_t pi(y_t)/mu_old(y_t) over the response tokens: three (B, T) -> (B,) float64, finite.

    Times R and averaged over samples of mu_old it is J_token. Its derivative gives Eq. 4.
    """
    weight = _difference(logp, logp_rollout, mask).clamp(max=600).exp()
    return (weight * mask).sum(-1)  # Eq. 3, Eq. 4


def first_order_gap(logp: Tensor, logp_rollout: Tensor, mask: Tensor) -> Tensor:
    """|prod_t (1 + d_t) - (1 + sum_t d_t)| of each response, 1 + d_t = pi/mu_old.

    Three (B, T) -> (B,) float64. It is what the first-order argument neglects. Computed from expm1,
    so that tiny d do not cancel, and bounded by about e^700, so that a response of 32,768 tokens
    gives a large number and never a NaN.
    """
    log_weight = _difference(logp, logp_rollout, mask).clamp(-600, 600)
    d = log_weight.expm1()  # d_t = pi/mu_old - 1
    product = log_weight.sum(-1).clamp(max=700).expm1()  # prod_t (1 + d_t) - 1, Eq. 1
    return (product - d.sum(-1)).abs()  # minus sum_t d_t, Eq. 3


def group_advantages(rewards: Tensor, group_ids: Tensor, std_norm: bool = False) -> Tensor:
    """A = R - mean of R over the responses with the same id.

    rewards (B,), group_ids (B,) int -> (B,) in the dtype of rewards (fp32 for ints). std_norm
    divides by the group's (population) standard deviation, as GRPO does. A group whose rewards are
    all equal gets exactly 0 either way.
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
    """-J_MiniRL of these responses (Sec. 4.1).

    `denom` is the number of responses in the whole mini-batch. Summed over micro-batches and ranks,
    the loss is then minus the mean over responses, however they were split.

    Ablations of the paper: is_correction=False drops the first factor of Eq. 5 from the weight,
    clip=False sets M = 1, length_norm=True divides each response's sum by its length. Returns the
    loss (0-d, gradient through logp only) and Stats.
    """
    logp, logp_old, logp_rollout = _zero_masked(mask, logp, logp_old, logp_rollout)

    # The logs of both factors of Eq. 5, as constants (sg).
    log_discrepancy = (logp_old - logp_rollout).detach()
    log_staleness = (logp - logp_old).detach()
    r = log_staleness.exp()  # r_t = pi / pi_old
    weight = (log_discrepancy + log_staleness).exp()  # sg[pi / mu_old], Eq. 5

    too_high, too_low = _clipped(r, adv, mask, eps_low, eps_high)
    keep = ~(too_high | too_low) if clip else torch.ones_like(mask)  # M_t
    w = weight if is_correction else r  # w/o train-infer-IS: the second factor alone
    coefficient = keep * w.clamp(max=is_cap) * adv[:, None]

    per_token = coefficient * logp  # its gradient is Eq. 4, with A for R, masked and capped
    if length_norm:
        per_token = per_token / mask.sum(-1, keepdim=True).clamp(min=1)
    return -per_token.sum() / denom, _stats(r, weight, too_high, too_low, mask, is_cap)


def grpo_loss(
    logp, logp_old, logp_rollout, adv, mask, *, denom, eps_low=0.2, eps_high=0.27, is_cap=5.0
) -> tuple[Tensor, Stats]:
    """-J_GRPO (Appendix A): the mean over a response of min(r_t A, clip(r_t) A).

    Averaged over `denom` responses. Arguments as in minirl_loss; r_t = pi/pi_old carries the
    gradient. mu_old does not appear: logp_rollout and is_cap serve the statistics alone. Pass
    advantages made with std_norm=True.
    """
    logp, logp_old, logp_rollout = _zero_masked(mask, logp, logp_old, logp_rollout)
    r = (logp - logp_old).exp()  # r_t with its gradient
    weight = (logp - logp_rollout).detach().exp()

    clamped = r.clamp(1 - eps_low, 1 + eps_high)
    per_token = torch.minimum(r * adv[:, None], clamped * adv[:, None]) * mask
    per_response = per_token.sum(-1) / mask.sum(-1).clamp(min=1)
    too_high, too_low = _clipped(r, adv, mask, eps_low, eps_high)
    return -per_response.sum() / denom, _stats(r, weight, too_high, too_low, mask, is_cap)


def cispo_loss(
    logp, logp_old, logp_rollout, adv, mask, *, denom, eps_low=0.2, eps_high=0.27, is_cap=5.0
) -> tuple[Tensor, Stats]:
    """-J_CISPO (Appendix A): sum_t sg[clip(r_t)] A log pi(y_t), with no token masked.

    Averaged over `denom` response *tokens*. Arguments as in minirl_loss. r_t = pi/pi_old; mu_old
    does not appear. Pass advantages made with std_norm=True.
    """
    logp, logp_old, logp_rollout = _zero_masked(mask, logp, logp_old, logp_rollout)
    r = (logp - logp_old).detach().exp()  # r_t
    weight = (logp - logp_rollout).detach().exp()

    per_token = r.clamp(1 - eps_low, 1 + eps_high) * adv[:, None] * logp
    too_high, too_low = _clipped(r, adv, mask, eps_low, eps_high)
    return -per_token.sum() / denom, _stats(r, weight, too_high, too_low, mask, is_cap)


# name -> (objective, what its `denom` counts over the whole mini-batch, std_norm of advantages).
# An objective takes the arguments of grpo_loss. It returns a 0-d loss, whose gradient goes through
# logp alone, and _stats(...). A response without response tokens must add 0: ranks pad with such.
OBJECTIVES = {
    "minirl": (minirl_loss, "responses", False),
    "grpo": (grpo_loss, "responses", True),
    "cispo": (cispo_loss, "tokens", True),
}


def kl_rollout_train(
    logp_rollout: Tensor, logp_old: Tensor, mask: Tensor, estimator: str = "k1"
) -> Tensor:
    """KL[mu_old || pi_old] in nats a token, estimated on tokens sampled from mu_old -> 0-d float64.

    "k1" is the paper's: the mean of log mu_old - log pi_old, unbiased, noisy, of either sign. "k3"
    is the mean of q - 1 - log q with q = pi_old/mu_old: the same expectation, never negative, far
    less noise. Any two policies will do: the first has sampled, the second may carry a gradient.
    """
    log_q = _difference(logp_old, logp_rollout, mask)
    per_token = {"k1": -log_q, "k3": log_q.clamp(max=600).expm1() - log_q}[estimator]
    return per_token.sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def discrepancy_stats(
    logp_old: Tensor, logp_rollout: Tensor, entropy: Tensor, mask: Tensor
) -> Stats:
    """How far the first factor of Eq. 5 is from 1, and the entropy of pi, as Stats."""
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


def merge_stats(micro_batches: list[Stats]) -> Stats:
    """The Stats of a mini-batch from those of its micro-batches on all ranks.

    A sum of tokens, maxima, and means over tokens.
    """
    tokens = torch.stack([stats["tokens"] for stats in micro_batches])
    merged = {"tokens": tokens.sum()}
    for name in micro_batches[0].keys() - {"tokens"}:
        values = torch.stack([stats[name] for stats in micro_batches])
        mean = (values * tokens).sum() / tokens.sum().clamp(min=1)
        merged[name] = values.amax() if name.endswith("_max") else mean
    return merged


def _zero_masked(mask: Tensor, *logps: Tensor) -> list[Tensor]:
    """Each (B, T) tensor with 0 where masked, even if it is infinite or NaN there."""
    return [logp.masked_fill(~mask, 0.0) for logp in logps]


def _difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """a - b in float64, 0 where masked."""
    a, b = _zero_masked(mask, a.double(), b.double())
    return a - b


def _clipped(r: Tensor, adv: Tensor, mask: Tensor, eps_low: float, eps_high: float):
    """Tokens outside the trust region, on the side to which A pushes them: two (B, T) bool."""
    too_high = (adv[:, None] > 0) & (r > 1 + eps_high) & mask
    too_low = (adv[:, None] < 0) & (r < 1 - eps_low) & mask
    return too_high, too_low


@torch.no_grad()
def _stats(r, weight, too_high, too_low, mask, is_cap) -> Stats:
    """What would be clipped and capped, whether the objective does so or not."""
    tokens = mask.sum().double()

    def mean(values: Tensor) -> Tensor:
        return (values.double() * mask).sum() / tokens.clamp(min=1)

    return {
        "tokens": tokens,
        "clip_frac_high": mean(too_high),
        "clip_frac_low": mean(too_low),
        "ratio_max": (r.detach() * mask).amax(),
        "is_weight_mean": mean(weight),
        "is_weight_max": (weight * mask).amax(),
        "is_capped_frac": mean(weight > is_cap),
    }
