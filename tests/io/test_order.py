"""Reading order: complete, different each epoch, equal steps on all ranks, resumable at any position."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.io.order import Position, ReadPlan, epoch_order

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple)


@settings(deadline=None)
@given(SIZES, st.integers(0, 5), st.integers(0, 4), st.integers(0, 9))
def test_each_record_once_in_every_epoch(sizes, window, seed, epoch):
    order = epoch_order(sizes, seed, epoch, window)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    assert np.array_equal(order, epoch_order(sizes, seed, epoch, window))


@pytest.mark.parametrize("window", [0, 1, 2])
def test_epochs_and_seeds_differ(window):
    orders = [epoch_order((50, 30), seed, epoch, window) for seed, epoch in itertools.product(range(3), range(3))]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


@settings(deadline=None)
@given(SIZES, st.integers(1, 4))
def test_a_window_needs_few_shards_at_a_time(sizes, window):
    shard = np.repeat(np.arange(len(sizes)), sizes)[epoch_order(sizes, 1, 0, window)]
    done, held = set(), set()
    for one in shard.tolist():
        assert one not in done
        if one not in held and len(held) == window:
            assert len([each for each in held if np.count_nonzero(shard == each)]) == window
            done, held = done | held, set()
        held.add(one)


@settings(deadline=None, max_examples=50)
@given(SIZES, st.sampled_from([1, 2, 3]), st.integers(1, 4), st.integers(0, 3))
def test_ranks_take_equal_steps_and_together_what_one_would(sizes, world, share, window):
    batch = world * share
    if sum(sizes) < batch:
        with pytest.raises(ValueError, match="do not fill a batch"):
            ReadPlan(sizes, batch, 1, 0, world, window)
        return
    plans = [ReadPlan(sizes, batch, 1, rank, world, window) for rank in range(world)]
    steps = 2 * plans[0].steps_per_epoch + 1
    each = [list(itertools.islice(plan.batches(), steps)) for plan in plans]
    whole = list(itertools.islice(ReadPlan(sizes, batch, 1, window=window).batches(), steps))
    for step in range(steps):
        assert {position for position, _ in (ranks[step] for ranks in each)} == {whole[step][0]}
        assert np.array_equal(np.concatenate([ranks[step][1] for ranks in each]), whole[step][1])
        assert all(len(ranks[step][1]) == share for ranks in each)
    first = np.concatenate([rows for _, rows in whole[: plans[0].steps_per_epoch]])
    assert len(set(first.tolist())) == len(first)


def test_resumes_at_every_position():
    plan = ReadPlan((7, 5, 9), 4, 3, window=2)
    whole = list(itertools.islice(plan.batches(), 13))
    assert whole[plan.steps_per_epoch - 1][0] == Position(1, 0)
    for done in range(12):
        rest = itertools.islice(plan.batches(whole[done][0]), 12 - done)
        for (position, rows), (wanted, wanted_rows) in zip(rest, whole[done + 1 :], strict=True):
            assert position == wanted
            assert np.array_equal(rows, wanted_rows)


def test_batches_that_cannot_be_shared():
    with pytest.raises(ValueError, match="cannot be shared by 2 ranks"):
        ReadPlan((9,), 3, 0, world=2)
