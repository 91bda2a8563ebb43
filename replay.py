"""Routing Replay: hold the discrete choice of experts fixed, so that the first-order argument survives an MoE.

With routing, both factors of Eq. 5 carry the experts e along (paper, Sec. 3):

    pi(y_t | e_pi)     pi_old(y_t | e_pi_old)     pi(y_t | e_pi)
    --------------  =  ----------------------  *  ----------------------                                Eq. 5
    mu_old(y_t | e_mu) mu_old(y_t | e_mu)         pi_old(y_t | e_pi_old)

    e_mu        chosen by the router inside vLLM while sampling
    e_pi_old    chosen by the router in the training engine, same weights theta_old
    e_pi        chosen by the router in the training engine, weights theta being trained

log pi is smooth in the weights and in rounding errors only while the experts stay the same. A top-K choice is a step
function: an error of 1e-3 in a router logit can swap one expert, and the token's probability jumps by far more than
rounding alone would move it. Then d_t in pi/mu_old = 1 + d_t is not small, and J_token does not approximate J_seq.
Replay computes log-probs under recorded experts instead:

    R2  vanilla Routing Replay   pi under e_pi_old                     repairs the second factor (staleness)
    R3  Rollout Routing Replay   pi and pi_old under e_mu              repairs both

R3 in one pass alone breaks what it should repair. With pi under e_mu but pi_old under the router's own experts,
pi/pi_old is not 1 even where theta is theta_old: the mask cuts tokens whose experts flipped, as if training had moved
them, objectives that weigh by pi/pi_old weigh wrongly, and KL[mu||pi_old] shows no repair. (MiniRL's weight is right
still: pi_old cancels in it. So is a step's first mini-batch, where train.update takes pi itself for pi_old.)

Gates are always recomputed from the live router logits (moe.py), so the router still learns. The price is a bias: the
policy that is optimized is the replayed one. Which one that is (paper, Table 1):

             first mini-batch               later mini-batches
    R2       pi itself (e_pi = e_pi_old)    changed
    R3       changed                        changed

Positions: experts[b, t] are the experts used when token t is the *input*; they shape the log-prob of token t + 1.
vLLM's record has a row for every input, prompt included: the length - 1 tokens before the last sampled one, which was
never fed back. So row i belongs to position i, without a shift, and the last position has no record (-1: the router's
choice): the last token is trained, by the record of the position before it, but nothing is predicted at its own. That
is `align_routes`. The shift by one is where a hidden state becomes a log-prob: train.logprobs takes the head's inputs
from t - 1. Whoever asks which experts made a response token's log-prob must shift the mask likewise: the `inputs` of
`agreement_counts`, which launch/report.py's `measure` makes.

Letters: T positions (padded, in a batch), L layers (dense ones too), E experts, K experts per token; `length` counts
prompt and response tokens of one sequence.
"""

import numpy as np
import torch
from torch import Tensor


def routes_for_pi_old(mode: str, e_mu: Tensor | None) -> Tensor | None:
    """The experts under which pi_old is computed in a pass of its own: e_mu for R3, else None, the router's (e_pi_old).

    A step's first mini-batch needs no such pass: its pi is pi_old, and recorded as such (train.update).
    """
    return e_mu if mode == "R3" else None  # Eq. 5, its first factor


def routes_for_pi(mode: str, e_mu: Tensor | None, e_pi_old: Tensor | None) -> Tensor | None:
    """The experts under which pi is computed: e_mu for R3, e_pi_old for R2, else None, the router's (e_pi).

    In the first mini-batch R2 has no e_pi_old yet, and none is needed: there e_pi is e_pi_old (Table 1).
    """
    return {"R3": e_mu, "R2": e_pi_old, "none": None}[mode]  # Eq. 5, its second factor


def align_routes(routed: np.ndarray, length: int, dense_layers: tuple[int, ...] = ()) -> Tensor:
    """vLLM's record (length - 1, L, K) laid on the positions of prompt + response -> (length, L, K) int16.

    -1 where there is no record: the last position, and `dense_layers`, for which the engine stores meaningless ids.
    Raises ValueError unless the record covers exactly the inputs, length - 1 positions.
    """
    rows = len(routed)
    if routed.ndim != 3 or rows != length - 1:
        raise ValueError(
            f"routes of shape {routed.shape} for {length} tokens, expected {length - 1} rows"
        )
    if not np.can_cast(routed.dtype, np.int16):  # no bad id may wrap around to a good one, or to -1
        routed = routed.astype(np.int64).clip(-2, 32767)
    out = torch.full((length, *routed.shape[1:]), -1, dtype=torch.int16)
    out.numpy()[:rows] = routed
    out[:, list(dense_layers)] = -1
    return out


def align_and_check(
    records: list[np.ndarray | None], lengths: list[int], num_experts: int, dense_layers=()
) -> tuple[list[Tensor | None], str]:
    """Each response's record aligned, or None where it is missing or unsound; and what was wrong with the last such."""
    aligned, why = [], ""
    for record, length in zip(records, lengths, strict=True):
        try:
            if record is None:
                raise ValueError("the engine returned no routes (enable_return_routed_experts)")
            routes = align_routes(record, length, dense_layers)
            sparse = [i for i in range(routes.shape[1]) if i not in dense_layers]
            check_routes(routes[:-1, sparse] if dense_layers else routes[:-1], num_experts)
        except ValueError as error:
            routes, why = None, str(error)
        aligned.append(routes)
    return aligned, why


def check_routes(experts: Tensor, num_experts: int) -> None:
    """Raises ValueError unless every row of (..., K) is K different ids in 0 .. num_experts - 1, or all -1.

    A row that vLLM never wrote is all zeros: K equal ids, caught as a repetition (for K = 1 it cannot be told from a
    choice of expert 0, so a record that is zero everywhere is refused).
    """
    rows = experts.reshape(-1, experts.shape[-1]).numpy()
    if rows.min(initial=0) < 0:
        rows = rows[(rows != -1).any(-1)]
    if not len(rows):
        return
    if rows.min() < 0 or rows.max() >= num_experts:
        raise ValueError(
            f"expert ids {rows.min()} to {rows.max()}, the model has 0 to {num_experts - 1}"
        )
    if not rows.any():
        raise ValueError(
            "every expert id is 0: the engine returned an empty record (enable_return_routed_experts)"
        )
    columns = np.ascontiguousarray(
        rows.T
    )  # comparing K columns of ids is faster than sorting K ids
    repeated = np.zeros(len(rows), bool)
    for i, column in enumerate(columns):
        repeated |= (columns[:i] == column).any(0)
    if repeated.any():
        first = sorted(rows[repeated][0].tolist())
        raise ValueError(f"an expert repeats in {repeated.sum()} rows, such as {first}")


def routing_agreement(
    experts_a: Tensor, experts_b: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """How often two engines choose the same set of experts: experts (B, T, L, K), inputs (B, T) bool.

    `inputs` says which positions count: those *before* a response token, not those of response tokens. Returns the
    share of them with equal sets, a layer at a time (L,) float64, NaN where there is nothing to compare (dense layers),
    and the share with at least one differing layer (0-d).
    """
    hits, out_of = agreement_counts(experts_a, experts_b, inputs)
    shares = hits / out_of
    return shares[:-1], shares[-1]


def agreement_counts(experts_a: Tensor, experts_b: Tensor, inputs: Tensor) -> Tensor:
    """routing_agreement as counts, which micro-batches and ranks may add up: (2, L + 1) float64.

    Row 0 counts the positions with equal sets in each layer and, last, those with a differing layer; row 1 those they
    are a share of. The order within K is not compared: vLLM's differs from the router's. Positions without a
    record (-1) in either are left out.
    """
    a, b = (e[inputs].sort(dim=-1).values for e in (experts_a, experts_b))  # (N, L, K)
    same, known = (a == b).all(-1), (a[..., 0] >= 0) & (b[..., 0] >= 0)  # (N, L)
    flipped = (known & ~same).any(-1)
    hits = torch.cat([(same & known).sum(0), flipped.sum()[None]])
    return torch.stack([hits, torch.cat([known.sum(0), known.any(-1).sum()[None]])]).double()
