"""Routes on their way from vLLM to the loss: each on its own position, checked, counted, or left out with its response.

Which policies R2 and R3 then optimize is in tests/test_formulation.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import response_logp

import moe
import replay
import rollout
import train

ALONE = train.Layout(engines=1, engine=0, member=0, tp=1)

# --- alignment


def test_row_i_of_the_record_belongs_to_input_i(tiny):
    """Prompt 5 + response 3 gives 7 rows. Row 4 is used at position 4 and moves the first response log-prob.

    Catches routes shifted by one (row 4 at position 5 would leave token 5 alone), and a loss that reads position 7,
    whose token was never fed back and has no record.
    """
    model = moe.load_pretrained(tiny())
    E, L, K = 8, 3, 2
    rows = torch.arange(7)[:, None, None]
    record = torch.cat([(rows + k) % E for k in range(K)], -1).expand(7, L, K)
    tokens, lengths = torch.randint(2, 98, (1, 8)), torch.tensor([8])
    mask = (torch.arange(8) >= 5)[None]

    def run(changed=None):
        routed = record.numpy().astype(np.uint8)
        if changed is not None and changed < 7:
            routed[changed] = [6, 1] if changed != 6 else [3, 1]
        experts = replay.align_routes(routed, 8)[None]
        if changed == 7:
            experts[0, 7] = torch.tensor([6, 1])
        logp = response_logp(model, tokens, lengths, mask, experts)
        return logp[0].detach(), model(tokens, lengths, experts)[1][0]

    logp, used = run()
    assert all(used[i, n].tolist() == [i % E, (i + 1) % E] for i in range(7) for n in range(L))
    # Causal: row i moves the log-prob of token i + 1 and, through attention, of later tokens; never of token i
    for row, moved in ((4, [5, 6, 7]), (5, [6, 7]), (6, [7]), (7, [])):
        difference = (run(row)[0] - logp).abs()  # 1e-5 for rounding: groups of other sizes
        assert (difference > 1e-5).nonzero()[:, 0].tolist() == moved, row
    assert not torch.equal(run(7)[1][7], used[7])


def test_align_routes_lays_the_record_on_positions():
    """4 tokens have 3 rows; -1 on the last position and in dense layers; other lengths are errors.

    Catches a record taken although it belongs to another response, and ids above 127 read as signed bytes.
    """
    record = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) + 190
    out = replay.align_routes(record, 4)
    assert out.dtype == torch.int16 and torch.equal(out[:3], torch.from_numpy(record).short())
    assert out[3].tolist() == [[-1, -1], [-1, -1]]
    dense = replay.align_routes(record, 4, dense_layers=(0,))
    assert dense[:, 0].unique().tolist() == [-1] and torch.equal(dense[:, 1], out[:, 1])
    for length in (2, 3, 5, 0):
        with pytest.raises(ValueError, match=f"expected {length - 1} rows"):
            replay.align_routes(record, length)
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        replay.align_routes(record[..., 0], 4)


# --- what is sound


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[0, 1], [7, 3], [-1, -1]], None),
        ([[-1, -1], [-1, -1]], None),
        ([[5], [0], [0]], None),
        ([[0, 1], [8, 3]], "0 to 8, not 0 to 7"),
        ([[0, 1], [-1, 3]], "-1 to 3"),
        ([[0, 1], [-2, -2]], "-2 to 1"),
        ([[0, 1], [3, 3]], r"repeats in 1 rows, such as \[3, 3\]"),
        ([[2, 1, 2], [2, 5, 2]], "repeats in 2 rows"),
        ([[0, 1], [0, 0]], r"such as \[0, 0\]"),
        ([[0, 0], [0, 0], [-1, -1]], "enable_return_routed_experts"),
        ([[0], [0]], "enable_return_routed_experts"),
    ],
)
def test_check_routes(rows, says):
    """Sound rows and rows of -1 pass; the rest is a ValueError that says what is wrong, or names the setting.

    Catches a half-missing row, a repetition that is not adjacent, and a buffer that the engine never wrote.
    """
    experts = torch.tensor(rows, dtype=torch.int16)[None]  # (1, T, K)
    if says is None:
        replay.check_routes(experts, 8)
    else:
        with pytest.raises(ValueError, match=says):
            replay.check_routes(experts, 8)


def responses(**changes):
    """Four sound responses of 3 tokens after a prompt of 2, as the engine would hand them over, with `changes`."""
    rows = np.arange(4, dtype=np.uint8)[:, None, None]
    # (4, L = 3, K = 2)
    record = np.concatenate([(rows + i) % 8 for i in range(2)], -1).repeat(3, 1)
    fields = {
        "tokens": [np.arange(5, dtype=np.int32) + b for b in range(4)],
        "prompt_lens": np.full(4, 2, np.int32),
        "logp_rollout": [np.full(3, -1.0 - b, np.float32) for b in range(4)],
        "routes": [record.copy() for _ in range(4)],
        "truncated": np.zeros(4, bool),
        "group_ids": np.array([0, 0, 1, 1], np.int32),
        "texts": list("abcd"),
        "rewards": np.array([1, 0, 1, 0], np.float32),
    }
    batch = rollout.Rollout(**fields)
    for name, (row, value) in changes.items():
        getattr(batch, name)[row] = value
    return batch


def spoiled(value, at=(1, 2)):
    """The sound record with `value` in one row of one layer."""
    record = responses().routes[0].astype(np.uint16)
    record[at] = value
    return record


UNSOUND = {
    "NaN from the engine": ("logp_rollout", np.array([-1, np.nan, -1], np.float32)),
    "-inf from the engine": ("logp_rollout", np.array([-1, -np.inf, -1], np.float32)),
    "no routes": ("routes", None),
    "routes all zero": ("routes", np.zeros((4, 3, 2), np.uint8)),
    "a layer never written": ("routes", spoiled(0, at=(slice(None), 1))),
    "an id = num_experts": ("routes", spoiled([0, 8])),
    "an id that int16 cannot hold": ("routes", spoiled([65535, 65535])),
    "one expert twice": ("routes", spoiled([3, 3])),
    "a row too few": ("routes", responses().routes[0][1:]),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_response_leaves_the_batch_and_is_counted(tiny, name):
    """Response 1 of four is unsound: three remain, one is counted, and all four unsound is an error.

    Catches a NaN turned into log-prob 0 (probability 1), a lost record trained on as expert 0, and rows that slip
    against their rewards or groups when one is taken out.
    """
    config = moe.MoEConfig.from_pretrained(tiny())
    field, value = UNSOUND[name]
    c = train.Config()
    batch, dropped = train.sound_responses(responses(**{field: (1, value)}), config, c, ALONE)
    assert dropped == 1 and len(batch) == 3
    assert [int(e[0, 0, 0]) for e in batch.experts_mu] == [0, 0, 0] and len(
        batch.experts_mu[0]
    ) == 5
    assert batch.texts == ["a", "c", "d"] and batch.group_ids.tolist() == [0, 1, 1]
    assert batch.rewards.tolist() == [1, 1, 0]
    assert [float(z[0]) for z in batch.logp_rollout] == [-1, -3, -4]
    everything = responses()
    getattr(everything, field)[:] = [value] * 4
    with pytest.raises((RuntimeError, ValueError), match=r"rout|expert|log-prob"):
        train.sound_responses(everything, config, c, ALONE)


def test_a_rank_aligns_and_keeps_its_own_rows(tiny, monkeypatch):
    """Two ranks of one engine, four responses: 0 and 2 belong to the first, 1 and 3 to the second, which finds 1 without
    routes. Each aligns two. Catches a response that no rank, or both, train on after one before it is dropped.
    """
    config, c = moe.MoEConfig.from_pretrained(tiny()), train.Config(rollout_tp=2)
    aligned, align = [], replay.align_routes
    monkeypatch.setattr(replay, "align_routes", lambda *z: (aligned.append(1), align(*z))[1])
    kept = []
    for member in (0, 1):
        layout = train.Layout(engines=1, engine=0, member=member, tp=2)
        batch, dropped = train.sound_responses(responses(routes=(1, None)), config, c, layout)
        kept.append((batch.texts, dropped))
    assert kept == [(["a", "c"], 0), (["d"], 1)] and len(aligned) == 3


def test_advantages_of_a_group_on_two_ranks(monkeypatch):
    """Group 0 has rewards 1 and 0 here and 1 on the other rank: A = R - 2/3. Catches the mean of a rank's own rows."""
    ours, theirs = responses().select([0, 1]), [(0, 1.0), (1, 0.5)]
    monkeypatch.setattr(train, "gather_object", lambda mine: [theirs, *mine])
    batch = train.advantages(ours, train.Config(), SimpleNamespace(process_index=1))
    assert batch.adv.tolist() == pytest.approx([1 / 3, -2 / 3])


@pytest.mark.parametrize(
    "flags", [{"record_routes": False}, {"record_routes": False, "replay": "R2"}]
)
def test_nothing_is_aligned_where_nobody_reads_routes(tiny, monkeypatch, flags):
    """Without --record-routes and R3 a batch trains without routes, and none are made up; R3 reads them all the same."""
    config = moe.MoEConfig.from_pretrained(tiny())
    monkeypatch.setattr(replay, "align_and_check", lambda *_: pytest.fail("aligned"))
    batch, dropped = train.sound_responses(responses(), config, train.Config(**flags), ALONE)
    assert batch.experts_mu is None and dropped == 0
    batch = replace(batch, adv=np.zeros(4, np.float32))
    assert batch.pad([0, 1]).experts_mu is None
    with pytest.raises(pytest.fail.Exception):
        train.sound_responses(batch, config, train.Config(**flags | {"replay": "R3"}), ALONE)


# --- agreement


A = [[[0, 1], [-1, -1], [2, 3]], [[1, 0], [-1, -1], [2, 3]], [[4, 5], [-1, -1], [-1, -1]]]
B = [[[1, 0], [-1, -1], [2, 3]], [[1, 2], [-1, -1], [5, 3]], [[5, 4], [-1, -1], [6, 7]]]


def test_routing_agreement_by_hand():
    """Three tokens that count and two that do not, three layers, the second dense.

    Catches comparing in order (vLLM's differs), counting -1 as agreement or as a flip, or tokens off the mask.
    """
    # layer 0: {0,1}={1,0}, {1,0}/{1,2}, {4,5}={5,4}: 2 of 3. layer 2: equal, {2,3}/{5,3}, no record in A: 1 of 2
    # tokens with a differing layer: only the second, of 3
    off = [[[0, 1]] * 3, [[6, 7]] * 3]
    a, b = (torch.tensor([z], dtype=torch.int16) for z in (A + off, B + off[::-1]))
    mask = torch.tensor([[1, 1, 1, 0, 0]]).bool()
    shares, flipped = replay.routing_agreement(a, b, mask)
    assert abs(shares[0] - 2 / 3) < 1e-12 and shares[1].isnan() and shares[2] == 0.5
    assert abs(flipped - 1 / 3) < 1e-12
    counts = replay.agreement_counts(a, b, mask)
    assert {name: count.tolist() for name, count in counts.items()} == {
        "same": [2, 0, 1],
        "known": [3, 0, 2],
        "flipped": 1,
        "tokens": 3,
    }
    pieces = [
        replay.agreement_counts(a[:, i : i + 1], b[:, i : i + 1], mask[:, i : i + 1])
        for i in range(5)
    ]
    other = replay.agreement_counts(b, a, mask)
    for name, count in counts.items():
        assert torch.equal(sum(piece[name] for piece in pieces), count)
        assert torch.equal(other[name], count)
