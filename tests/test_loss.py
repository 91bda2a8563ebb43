"""loss.py in small numbers, worked out by hand: sums over splits, merged statistics, masks, gradients, groups, KL.

The derivation itself is executed in tests/test_formulation.py.
"""

from math import log

import pytest
import torch
from conftest import response_logp

import loss
import moe

OBJECTIVES = loss.OBJECTIVES


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# --- what is summed, and divided by what


def test_loss_does_not_depend_on_the_split_by_hand():
    """Token losses [1] and [2, 2, 2], a mean over 2 responses, are 3.5 however they are split and padded.

    Catches means per micro-batch (1/1 + 6/3 = 3, or their mean) and division by the responses at hand.
    """
    # pi = pi_old = mu, so every weight is 1 and with A = 1 a token's loss is -logp: (1 + 2 + 2 + 2) / 2 = 3.5
    logp = torch.tensor([[0.0, -1.0, 0.0, 0.0], [0.0, -2.0, -2.0, -2.0]])
    mask = logp < 0
    for split in ([[0, 1]], [[1, 0]], [[0], [1]], [[1], [0]]):
        total = 0.0
        for rows in split:
            width = int(mask[rows].sum(-1).max()) + 1
            z, m = logp[rows, :width].clone().requires_grad_(), mask[rows, :width]
            value, _ = loss.minirl_loss(
                z, z.detach(), z.detach(), torch.ones(len(rows)), m, denom=2
            )
            value.backward()
            assert torch.equal(z.grad, -0.5 * m)  # -A / denom on response tokens
            total += float(value.detach())
        assert total == 3.5, split


@pytest.mark.parametrize("name", OBJECTIVES)
def test_parameter_gradients_do_not_depend_on_the_split(tiny, name):
    """Through the model, for each objective: three ragged responses at once, in two parts, one by one, reversed.

    Catches normalizers taken from the micro-batch, and anything in the model that sees its neighbours in the batch.
    """
    model = moe.load_pretrained(tiny(), dtype=torch.float64)  # so that rounding hides nothing
    objective, counted, _ = OBJECTIVES[name]
    starts, lengths = torch.tensor([3, 2, 4]), torch.tensor([4, 9, 7])
    tokens, place = torch.randint(2, 98, (3, 9)), torch.arange(9)
    mask = (place >= starts[:, None]) & (place < lengths[:, None])
    adv, shift = torch.tensor([1.0, -0.5, 0.7]), torch.randn(2, 3, 9) * 0.2
    denom = {"responses": 3, "tokens": int(mask.sum())}[counted]
    results = []
    for split in ([[0, 1, 2]], [[0, 1], [2]], [[0], [1], [2]], [[2], [1, 0]]):
        model.zero_grad()
        total = 0.0
        for rows in split:
            T = int(lengths[rows].max())
            m = mask[rows, :T]
            logp = response_logp(model, tokens[rows, :T], lengths[rows], m)
            old, mu = (logp.detach() + z[rows, :T] for z in shift)
            value, _ = objective(
                logp, old, mu, adv[rows], m, denom=denom, eps_low=0.2, eps_high=0.27
            )
            value.backward()
            total += float(value.detach())
        results.append((total, gradients(model)))
    for total, grads in results[1:]:
        assert abs(total - results[0][0]) < 1e-12
        assert all((g - results[0][1][n]).abs().max() < 1e-12 for n, g in grads.items())
    assert max(g.abs().max() for g in results[0][1].values()) > 1e-2


def test_merged_statistics_are_those_of_the_whole():
    """Merged over uneven micro-batches, one without response tokens, Stats equal those of one pass over all.

    Catches the last micro-batch's value, a mean of means ((.1 + .3) / 2 = .2 below) and a mean of maxima.
    """
    # |log pi_old - log mu|: .1 on one token, .3 on three. Mean (.1 + 3 * .3) / 4 = .25, largest .3
    mu = torch.full((3, 4), -2.0)
    old = mu + torch.tensor([[0, 0.1, 0, 0], [0, 0.3, 0.3, -0.3], [0, 9, 9, 9]])
    logp = old + torch.tensor([[0, 0.5, 0, 0], [0, 0.0, 1.5, 0.2], [0, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]).bool()
    adv, entropy = torch.tensor([1.0, 1.0, -1.0]), torch.rand(3, 4)

    def stats(rows):
        z = [x[rows] for x in (logp, old, mu, adv, mask)]
        _, of_loss = loss.minirl_loss(*z, denom=3)
        return of_loss | loss.discrepancy_stats(old[rows], mu[rows], entropy[rows], mask[rows])

    whole = stats([0, 1, 2])
    assert abs(whole["logp_diff_mean"] - 0.25) < 1e-6 and abs(whole["logp_diff_max"] - 0.3) < 1e-6
    for split in ([[0], [1], [2]], [[1], [0, 2]], [[2], [1, 0]]):
        merged = loss.merge_stats([stats(rows) for rows in split])
        assert merged.keys() == whole.keys()
        for key, value in whole.items():
            torch.testing.assert_close(
                merged[key], value, rtol=1e-6, atol=1e-9, msg=f"{split} {key}"
            )
    # r_t = e^.5, 1, e^1.5, e^.2: two of four above 1.27; weights e^.6, e^.3, e^1.8, e^-.1: one above 5
    assert (
        whole["tokens"] == 4 and whole["clip_frac_high"] == 0.5 and whole["is_capped_frac"] == 0.25
    )
    empty = loss.merge_stats([stats([2])])
    assert all(torch.isfinite(v) for v in empty.values())


# --- what carries a gradient, and what must not


def test_the_weight_carries_no_gradient():
    """d loss / d logp is -w A / denom and nothing else, and mu and pi_old get no gradient at all.

    Catches a missing stop-gradient: the derivative of w log pi would be w (1 + log pi), here of the other sign.
    """
    # pi = .5 and .4, pi_old = .5 and .4, mu = .25 and .5: w = 2 and .8; A = 3, denom = 2 -> -3 and -1.2
    logp, old, mu = (
        torch.tensor([z]).log().requires_grad_() for z in ([0.5, 0.4], [0.5, 0.4], [0.25, 0.5])
    )
    mask = torch.ones(1, 2, dtype=torch.bool)
    value, stats = loss.minirl_loss(logp, old, mu, torch.tensor([3.0]), mask, denom=2)
    value.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-3.0, -1.2]]))
    assert old.grad is None and mu.grad is None
    assert not any(z.requires_grad for z in stats.values())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("junk", [float("-inf"), float("inf"), float("nan")])
def test_nothing_at_masked_positions_is_ever_seen(name, junk):
    """-inf, inf or NaN off the mask changes no loss, gradient or statistic.

    Catches masking by multiplication, where 0 * inf is NaN, in forward and (behind torch.where) in backward.
    """
    torch.manual_seed(1)
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    clean = [-torch.rand(2, 5) for _ in range(3)]
    results = []
    for fill in (0.0, junk):
        logp, old, mu = (z.masked_fill(~mask, fill) for z in clean)
        logp.requires_grad_()
        entropy = torch.ones(2, 5).masked_fill(~mask, fill)
        value, stats = OBJECTIVES[name][0](logp, old, mu, torch.tensor([1.0, -1.0]), mask, denom=2)
        value.backward()
        stats = stats | loss.discrepancy_stats(old, mu, entropy, mask)
        gaps = (loss.first_order_gap, loss.sequence_weight, loss.token_weights)
        others = [f(logp.detach(), mu, mask) for f in gaps]
        results.append([value.detach(), logp.grad, *others, *(stats[k] for k in sorted(stats))])
    assert all(torch.isfinite(z).all() for z in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[1][1][~mask].any() and results[1][1][mask].any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_without_response_tokens(tiny, name):
    """Without response tokens the loss is 0, and every parameter has a gradient, of zeros.

    Catches 0 / 0, and a loss cut off from the parameters, on which an FSDP rank would wait for ever.
    """
    model = moe.load_pretrained(tiny())
    tokens, lengths = torch.randint(2, 98, (2, 6)), torch.tensor([6, 3])
    mask = torch.zeros(2, 6, dtype=torch.bool)
    logp = response_logp(model, tokens, lengths, mask)
    z = torch.zeros(2, 6)
    value, stats = OBJECTIVES[name][0](logp, z, z, torch.ones(2), mask, denom=4)
    value.backward()
    assert value == 0 and all(torch.isfinite(s) for s in stats.values())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- advantages; the discrepancy


def test_groups_are_told_apart_by_id():
    """The same problem twice in one batch, G = 2, rewards [1, 0] and [1, 1]: .5 -.5 0 0, in any order.

    Catches groups keyed by prompt text (.25 -.75 .25 .25), and groups assumed to be contiguous or numbered from 0.
    """
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert loss.group_advantages(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [0.5, -0.5, 0, 0]
    mixed = loss.group_advantages(rewards[[0, 2, 1, 3]], torch.tensor([9, 5, 9, 5]))
    assert mixed.tolist() == [0.5, 0, -0.5, 0]
    # R = 1 0 0 0: mean 1/4, population variance (9/16 + 3 * 1/16) / 4 = 3/16, A / std = sqrt(3), -1 / sqrt(3)
    alone = loss.group_advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4).int(), std_norm=True)
    torch.testing.assert_close(alone, torch.tensor([3**0.5, *[-(3**-0.5)] * 3]))


@pytest.mark.parametrize("std_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_give_exactly_zero(std_norm, dtype):
    """16 rewards of .35, a group of three of .1, a group of one. Catches a mean that rounds, divided by a
    standard deviation that is all rounding: advantages of +-1 out of nothing."""
    rewards = torch.tensor([0.35] * 16 + [0.1] * 3 + [0.7], dtype=dtype)
    ids = torch.tensor([0] * 16 + [1] * 3 + [2])
    adv = loss.group_advantages(rewards, ids, std_norm=std_norm)
    assert adv.dtype == dtype and adv.tolist() == [0.0] * 20


def test_kl_rollout_train_by_hand():
    """KL[mu || pi_old] on tokens of mu: k1 and k3, response tokens only, finite when the engines disagree wildly.

    Catches the other direction (of the other sign, and another k3) and a mean over padding.
    """
    # mu = .5 .25 .5, pi_old = .25 .25 .75, r = pi_old/mu = .5 1 1.5
    mu, old = (
        torch.tensor([[0.9, 0.5, 0.25, 0.5]]).log(),
        torch.tensor([[0.1, 0.25, 0.25, 0.75]]).log(),
    )
    mask = torch.tensor([[0, 1, 1, 1]]).bool()
    k1 = (log(2) + 0 - log(1.5)) / 3  # mean of -log r
    k3 = ((0.5 - 1 + log(2)) + 0 + (1.5 - 1 - log(1.5))) / 3  # mean of r - 1 - log r
    assert abs(loss.kl_rollout_train(mu, old, mask) - k1) < 1e-7
    assert abs(loss.kl_rollout_train(mu, old, mask, estimator="k3") - k3) < 1e-7
    for far in (-2000.0, 2000.0):
        assert torch.isfinite(loss.kl_rollout_train(mu, mu + far, mask, "k3"))
