"""Laws of the batch plan: every sample once an epoch, whatever the layout; a pure function of its arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.data.batches import Batch, bucket_edges, epoch_batches, replica_share, samples_of_nodes

LENGTHS = st.lists(st.sampled_from([8, 16, 24, 128]), min_size=1, max_size=90).map(np.array)
BATCH_SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**40)
DP = st.sampled_from([1, 2, 3, 4, 8])
MICROBATCHES = st.sampled_from([1, 2, 3, 4, 8])


def _same(left: tuple[Batch, ...], right: tuple[Batch, ...]) -> bool:
    return len(left) == len(right) and all(
        (a.index, a.length) == (b.index, b.length) and np.array_equal(a.ids, b.ids)
        for a, b in zip(left, right, strict=True)
    )


@given(lengths=LENGTHS, batch_size=BATCH_SIZES, seed=SEEDS, epoch=st.integers(0, 50), shuffle=st.booleans())
def test_each_sample_once_and_one_bucket_a_batch(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    batches = epoch_batches(lengths, batch_size=batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(np.concatenate([batch.ids for batch in batches])) == list(range(len(lengths)))
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert all((lengths[batch.ids] == batch.length).all() for batch in batches)
    short = [batch.length for batch in batches if len(batch.ids) < batch_size]
    assert len(short) == len(set(short)) and all(len(batch.ids) <= batch_size for batch in batches)


@given(lengths=LENGTHS, batch_size=BATCH_SIZES, seed=SEEDS, dp=DP, num_microbatches=MICROBATCHES, shuffle=st.booleans())
def test_real_rows_of_all_replicas_are_the_batch(
    lengths: np.ndarray, batch_size: int, seed: int, dp: int, num_microbatches: int, shuffle: bool
) -> None:
    for batch in epoch_batches(lengths, batch_size=batch_size, seed=seed, epoch=1, shuffle=shuffle):
        shares = [
            replica_share(batch, dp=dp, replica=replica, num_microbatches=num_microbatches) for replica in range(dp)
        ]
        assert np.array_equal(np.concatenate([share.ids[: share.num_real] for share in shares]), batch.ids)
        rows = {len(share.ids) for share in shares}
        assert len(rows) == 1
        assert rows.pop() * dp - len(batch.ids) in range(dp * num_microbatches)
        assert all(len(share.ids) % num_microbatches == 0 for share in shares)
        assert all(np.isin(share.ids, batch.ids).all() for share in shares)


@given(lengths=LENGTHS, batch_size=BATCH_SIZES, seed=SEEDS, epoch=st.integers(0, 50))
def test_batches_are_a_pure_function(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> None:
    first = epoch_batches(lengths, batch_size=batch_size, seed=seed, epoch=epoch)
    np.random.default_rng().random()
    assert _same(first, epoch_batches(lengths.copy(), batch_size=batch_size, seed=seed, epoch=epoch))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (1, 1)])
def test_seed_and_epoch_change_the_order(seed: int, epoch: int) -> None:
    lengths = np.repeat([8, 16], 100)
    first = epoch_batches(lengths, batch_size=16, seed=0, epoch=0)
    assert not _same(first, epoch_batches(lengths, batch_size=16, seed=seed, epoch=epoch))


def test_unshuffled_order_is_longest_first_then_by_id() -> None:
    batches = epoch_batches(np.array([8, 16, 8, 16, 16]), batch_size=2, seed=0, epoch=0, shuffle=False)
    assert [(batch.length, batch.ids.tolist()) for batch in batches] == [(16, [1, 3]), (16, [4]), (8, [0, 2])]


def test_short_batch_is_filled_at_its_end() -> None:
    batch = Batch(index=0, parts=(np.array([5, 6, 7, 8, 9]),), length=8)
    shares = [replica_share(batch, dp=4, replica=replica, num_microbatches=2) for replica in range(4)]
    assert [share.ids.tolist() for share in shares] == [[5, 6], [7, 8], [9, 5], [6, 7]]
    assert [share.num_real for share in shares] == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("num_tokens", "max_length", "edge"),
    [
        (0, 512, 2), (1, 512, 2), (3, 512, 4), (8, 512, 8), (9, 512, 10), (16, 512, 16), (17, 512, 20), (33, 512, 40),
        (129, 512, 160), (512, 512, 512), (513, 2048, 640), (641, 2048, 768), (119, 120, 120), (2000, 2000, 2000),
        (5, 5, 5),
    ],
)  # fmt: skip
def test_bucket_edges(num_tokens: int, max_length: int, edge: int) -> None:
    assert bucket_edges(np.array([num_tokens]), max_length=max_length).tolist() == [edge]


@given(num_tokens=st.lists(st.integers(0, 3000), min_size=1).map(np.array), data=st.data())
@settings(max_examples=50)
def test_a_bucket_edge_depends_on_its_sample_alone(num_tokens: np.ndarray, data: st.DataObject) -> None:
    edges = bucket_edges(num_tokens, max_length=3000)
    chosen = data.draw(st.integers(0, len(num_tokens) - 1))
    assert bucket_edges(num_tokens[[chosen]], max_length=3000) == edges[chosen]
    assert (edges >= num_tokens).all() and (edges <= 3000).all()
    assert (edges - num_tokens <= np.maximum(num_tokens / 4, 2)).all(), "little of a text is padding"


@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize(("dp_of_a_node", "num_microbatches"), [(1, 1), (2, 2)])
def test_samples_stay_with_their_node(num_nodes: int, dp_of_a_node: int, num_microbatches: int) -> None:
    lengths = np.repeat([8, 16, 24], [57, 32, 5])
    nodes = samples_of_nodes(lengths, num_nodes=num_nodes)
    dp = num_nodes * dp_of_a_node
    orders = []
    for epoch in range(2):
        batches = epoch_batches(lengths, batch_size=14, seed=0, epoch=epoch, num_nodes=num_nodes)
        assert sorted(np.concatenate([batch.ids for batch in batches])) == list(range(len(lengths)))
        assert all(len(batch) <= 14 and (lengths[batch.ids] == batch.length).all() for batch in batches)
        for batch in batches:
            shares = [replica_share(batch, dp=dp, replica=r, num_microbatches=num_microbatches) for r in range(dp)]
            assert len({len(share.ids) for share in shares}) == 1 and len(shares[0].ids) % num_microbatches == 0
            for replica, share in enumerate(shares):
                assert (nodes[share.ids[: share.num_real]] == replica // dp_of_a_node).all()
            real = np.concatenate([share.ids[: share.num_real] for share in shares])
            assert np.array_equal(real, batch.ids)
        orders.append(np.concatenate([batch.ids for batch in batches]))
    assert not np.array_equal(*orders), "a node's samples are shuffled anew"


@pytest.mark.parametrize(("num_nodes", "batch_size"), [(2, 32), (3, 32), (3, 31), (4, 30), (5, 4)])
def test_nodes_add_a_short_batch_each_at_most(num_nodes: int, batch_size: int) -> None:
    lengths = np.repeat([8, 16], [1000, 333])
    batches = epoch_batches(lengths, batch_size=batch_size, seed=0, epoch=0, num_nodes=num_nodes)
    for length in (8, 16):
        short = [batch for batch in batches if batch.length == length and len(batch) < batch_size]
        assert len(short) <= num_nodes


def test_no_node_is_left_without_a_sample_where_there_are_enough() -> None:
    lengths = np.array([8, 16, 24, 32])  # all different
    assert sorted(samples_of_nodes(lengths, num_nodes=4)) == [0, 1, 2, 3]


def test_one_node_is_the_plan_without_nodes() -> None:
    lengths = np.repeat([8, 16], [30, 21])
    settings = dict(batch_size=8, seed=3, epoch=1)
    assert _same(epoch_batches(lengths, **settings), epoch_batches(lengths, **settings, num_nodes=1))
