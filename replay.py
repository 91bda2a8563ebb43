"""Routing Replay: fix the discrete choice of experts, so that the first-order argument holds.

With routing, both factors of Eq. 5 carry the experts e along (paper, Sec. 3):

    pi(y_t | e_pi)     pi_old(y_t | e_pi_old)     pi(y_t | e_pi)
    --------------  =  ----------------------  *  ----------------------                       Eq. 5
    mu_old(y_t | e_mu) mu_old(y_t | e_mu)         pi_old(y_t | e_pi_old)

    e_mu        experts_mu    chosen by the router inside vLLM while sampling
    e_pi_old    experts_old   chosen by the router in the training engine, weights theta_old
    e_pi        chosen        chosen by the router in the training engine, weights theta

`experts`, an argument, is what a pass is made to use: one of these, or None, the router's choice.

log pi is smooth in the weights and in rounding errors only while the experts stay the same. A top-K
choice is a step function: an error of 1e-3 in a router logit can swap one expert, and the token's
probability jumps by far more than rounding alone would move it. Then d_t in pi/mu_old = 1 + d_t is
not small, and J_token does not approximate J_seq. Replay computes log-probs under recorded experts:

    R2  vanilla Routing Replay   pi under e_pi_old                repairs the second factor
    R3  Rollout Routing Replay   pi and pi_old under e_mu         repairs both

R3 must be in both passes. With pi under e_mu but pi_old under the router's own experts, pi/pi_old
is not 1 even at theta = theta_old: the mask cuts tokens whose experts flipped, as if training had
moved them, and KL[mu||pi_old] shows no repair. (The weight pi/mu_old does not contain pi_old. A
step's first mini-batch is safe too, since pi_old is pi there.)

Gates always come from the live router logits (moe.py), so the router still learns. The price is a
bias: the policy that is optimized is the replayed one (paper, Table 1):

             first mini-batch               later mini-batches
    R2       pi itself (e_pi = e_pi_old)    changed
    R3       changed                        changed

Positions: experts[b, t] are the experts used when token t is the *input*. They shape the log-prob
of token t + 1. vLLM's record ("routes") has a row for every input, prompt included: all tokens but
the last sampled one, which was never fed back. So row i belongs to position i, without a shift, and
the last position has no record (-1: the router's choice). That is `align_routes`. The shift by one
is where a hidden state becomes a log-prob: train.logprobs takes the head's inputs from t - 1.
Whoever asks which experts made a response token's log-prob must shift the mask likewise: that is
`inputs` of `agreement_counts`.

Letters: B sequences, T positions, L layers (dense ones too), E experts, K experts per token;
`length` counts prompt and response tokens of one sequence.
"""

import numpy as np
import torch
from torch import Tensor


def experts_for_pi_old(mode: str, experts_mu: Tensor | None) -> Tensor | None:
    """The experts under which pi_old is computed in a pass of its own.

    e_mu for R3, else None: the router's own, e_pi_old. A step's first mini-batch needs no such
    pass, since its pi is pi_old.
    """
    return experts_mu if mode == "R3" else None  # Eq. 5, pi_old of both factors


def experts_for_pi(mode: str, experts_mu: Tensor | None, experts_old: Tensor | None):
    """The experts under which pi is computed: e_mu for R3, e_pi_old for R2, else None (e_pi).

    In a step's first mini-batch R2 has no e_pi_old yet, and needs none: there e_pi is e_pi_old.
    """
    return {"R3": experts_mu, "R2": experts_old, "none": None}[mode]  # Eq. 5, pi


def align_routes(routed: np.ndarray, length: int, dense_layers: tuple[int, ...] = ()) -> Tensor:
    """vLLM's record (length - 1, L, K) laid on the positions of a sequence -> (length, L, K) int16.

    -1 where there is no record: at the last position, and in `dense_layers`, for which the engine
    stores meaningless ids. Raises ValueError unless there is a row for each of length - 1 inputs.
    """
    rows = len(routed)
    if routed.ndim != 3 or rows != length - 1:
        raise ValueError(f"routes of shape {routed.shape}, expected {length - 1} rows")
    if not np.can_cast(routed.dtype, np.int16):  # no bad id may wrap around to a good one, or to -1
        routed = routed.astype(np.int64).clip(-2, 32767)
    experts = torch.full((length, *routed.shape[1:]), -1, dtype=torch.int16)
    experts.numpy()[:rows] = routed
    experts[:, list(dense_layers)] = -1
    return experts


def align_and_check(
    routes: list[np.ndarray | None], lengths: list[int], num_experts: int, dense_layers=()
) -> tuple[list[Tensor | None], str]:
    """experts_mu of each response, None if its record is missing or unsound; the last reason."""
    aligned, why = [], ""
    for record, length in zip(routes, lengths, strict=True):
        try:
            if record is None:
                raise ValueError("the engine returned no routes (enable_return_routed_experts)")
            experts = align_routes(record, length, dense_layers)
            moe_layers = [i for i in range(experts.shape[1]) if i not in dense_layers]
            check_routes(experts[:-1, moe_layers] if dense_layers else experts[:-1], num_experts)
        except ValueError as error:
            experts, why = None, str(error)
        aligned.append(experts)
    return aligned, why


def check_routes(experts: Tensor, num_experts: int) -> None:
    """Raises ValueError unless every row of (..., K) is K different ids in 0 .. E - 1, or all -1.

    A row of -1 means that nothing was recorded there, and is never vLLM's own.

    A row that vLLM never wrote is all zeros: K equal ids, found as a repetition. (For K = 1 that is
    also a choice of expert 0, so a record that is zero everywhere is refused.)
    """
    rows = experts.reshape(-1, experts.shape[-1]).numpy()
    if rows.min(initial=0) < 0:
        rows = rows[(rows != -1).any(-1)]
    if not len(rows):
        return
    if rows.min() < 0 or rows.max() >= num_experts:
        raise ValueError(f"expert ids {rows.min()} to {rows.max()}, not 0 to {num_experts - 1}")
    if not rows.any():
        raise ValueError("every expert id is 0: an empty record (enable_return_routed_experts)")

    columns = np.ascontiguousarray(rows.T)  # comparing K columns is faster than sorting K ids
    repeated = np.zeros(len(rows), bool)
    for i, column in enumerate(columns):
        repeated |= (columns[:i] == column).any(0)
    if repeated.any():
        first = sorted(rows[repeated][0].tolist())
        raise ValueError(f"an expert repeats in {repeated.sum()} rows, such as {first}")


def routing_agreement(
    experts_a: Tensor, experts_b: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """How often two engines choose the same set: experts (B, T, L, K), inputs (B, T) bool.

    `inputs` are the positions that count: those *before* a response token, not those of response
    tokens. Returns the share of them with equal sets, a layer at a time (L,) float64, NaN if there
    is nothing to compare (dense layers), and the share with a difference in any layer (0-d).
    """
    counts = agreement_counts(experts_a, experts_b, inputs)
    return counts["same"] / counts["known"], counts["flipped"] / counts["tokens"]


def agreement_counts(experts_a: Tensor, experts_b: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """routing_agreement as counts, which micro-batches and ranks may add up: float64 on the CPU.

    same and known (L,): the positions with equal sets, of those that both engines recorded.
    flipped and tokens (0-d): those with a difference in any layer, of those recorded in any. The
    order within K is not compared: vLLM's differs from the router's.
    """
    a = experts_a[inputs].sort(dim=-1).values  # (N, L, K)
    b = experts_b[inputs].sort(dim=-1).values
    known = (a[..., 0] >= 0) & (b[..., 0] >= 0)  # (N, L)
    same = (a == b).all(-1) & known
    counts = {
        "same": same.sum(0),
        "known": known.sum(0),
        "flipped": (known & ~same).any(-1).sum(),
        "tokens": known.any(-1).sum(),
    }
    return {name: count.double().cpu() for name, count in counts.items()}
