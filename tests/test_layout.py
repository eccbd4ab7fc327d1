"""Who holds what: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_shift.layout import HeadLayout, Layout, LayoutError, divisors

WORLDS = st.integers(1, 64)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(WORLDS)
    return Layout(world, draw(st.sampled_from(divisors(world))))


def test_groups_of_eight_ranks_with_sp_four():
    layout = Layout(8, 4)
    assert layout.sp_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.base_tp_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.tp_size == 2


@given(layouts())
def test_every_rank_is_in_one_group_of_each_kind_at_its_own_place(layout: Layout):
    for rank in range(layout.world_size):
        assert layout.sp_groups[layout.base_tp_rank(rank)][layout.sp_rank(rank)] == rank
        assert layout.base_tp_groups[layout.sp_rank(rank)][layout.base_tp_rank(rank)] == rank


@given(layouts(), st.integers(1, 10_000))
def test_slices_cover_the_batch_in_order_with_padding_at_the_end_only(layout: Layout, num_tokens: int):
    group = layout.sp_groups[0]
    slices = [layout.slice_of(rank, num_tokens) for rank in group]
    tokens = [t for s in slices for t in range(s.start, s.start + s.real)]
    assert tokens == list(range(num_tokens))
    assert {s.rows for s in slices} == {layout.rows_per_rank(num_tokens)}
    padding = [i for s in slices for i in range(s.start + s.real, s.start + s.rows)]
    assert all(i >= num_tokens for i in padding)
    assert len(padding) < layout.sp_size


@given(layouts(), st.integers(1, 8), st.integers(0, 6), st.booleans())
def test_full_tp_and_the_exchange_put_the_same_heads_on_each_rank(layout: Layout, factor: int, power: int, many: bool):
    """KV-cache invariance: the heads that rank r gets through the exchange are those SGLang's TP=P gives it."""
    world = layout.world_size
    num_heads = world * factor
    num_kv_heads = num_heads if many else divisors(world)[power % len(divisors(world))]
    try:
        heads = HeadLayout(layout, num_heads, num_kv_heads)
    except LayoutError:
        assert num_kv_heads % layout.tp_size
        assert layout.tp_size % num_kv_heads
        return
    for rank in range(world):
        sp_rank, tp_rank = layout.sp_rank(rank), layout.base_tp_rank(rank)
        base_heads = num_heads // layout.tp_size
        sent = [tp_rank * base_heads + sp_rank * heads.heads_per_rank + i for i in range(heads.heads_per_rank)]
        assert sent == list(range(rank * heads.heads_per_rank, (rank + 1) * heads.heads_per_rank))
        # QKVParallelLinear: shard (rank // replicas) of the KV heads, one head where there are fewer than ranks
        first_here = rank // max(1, world // num_kv_heads) * heads.kv_heads_per_rank
        first_base = tp_rank // max(1, layout.tp_size // num_kv_heads) * heads.base_kv_heads
        assert [first_base + k for k in heads.kv_head_map[sp_rank]] == [
            first_here + i for i in range(heads.kv_heads_per_rank)
        ]


@pytest.mark.parametrize(
    ("world", "sp", "nodes", "crosses"),
    [(16, 8, 2, True), (16, 16, 2, False), (8, 4, 1, False), (8, 2, 2, True), (16, 8, 4, True)],
)
def test_base_tp_groups_that_leave_a_node_are_known(world, sp, nodes, crosses):
    assert Layout(world, sp).base_tp_crosses(nodes) == crosses


def test_kv_heads_fewer_than_ranks_are_replicated():
    heads = HeadLayout(Layout(8, 8), 32, 4)
    assert heads.kv_replication == 2
    assert heads.kv_head_map == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize(
    ("world", "sp", "heads", "kv_heads", "message"),
    [
        (8, 3, 8, 8, "--sp-size 3 does not divide --tp-size 8; use --sp-size 2, 4 or 8"),
        (4, 8, 8, 8, "--sp-size 8 does not divide --tp-size 4; use --sp-size 2 or 4"),
        (1, 2, 8, 8, "--sp-size 2 does not divide --tp-size 1; raise --tp-size"),
        (4, 4, 6, 2, "6 attention heads cannot be split over --tp-size = 4; use --tp-size 2 --sp-size 2"),
        (4, 2, 12, 3, "3 KV heads can neither be split nor replicated over --tp-size = 4; use --tp-size 3 --sp-size 3"),
        # passes at P=6 and fails inside the base configuration
        (6, 3, 6, 3, r"3 KV heads .* base TP degree .* = 2; with --tp-size 6, use --sp-size 2 or 6"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_works(world, sp, heads, kv_heads, message):
    with pytest.raises(LayoutError, match=message):
        HeadLayout(Layout(world, sp), heads, kv_heads)
