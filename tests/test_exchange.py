"""The exchange, over virtual ranks in one process, against what each rank must end up with."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_shift.exchange import gather_heads, gather_rows, scatter_heads
from sgl_shift.forward import _take
from sgl_shift.layout import HeadLayout, Layout


class ThreadGroup:
    """An SP group whose ranks are threads: real blocking collectives over shared memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)

    def member(self, rank: int) -> Member:
        return Member(self, rank)


class Member:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def _share(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        self.group.slots[self.rank] = tensor
        self.group.barrier.wait()
        shared = list(self.group.slots)
        self.group.barrier.wait()
        return shared

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(torch.cat([t.chunk(self.group.size)[self.rank] for t in self._share(input)]))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(torch.cat(self._share(input)))


def on_ranks(size: int, function):
    group = ThreadGroup(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(group.member(rank), rank), range(size)))


@settings(deadline=None, max_examples=60)
@given(
    sp=st.sampled_from([2, 3, 4]),
    tp=st.sampled_from([1, 2]),
    kv=st.sampled_from(["all", "half", "one"]),
    num_tokens=st.integers(1, 13),
    v_dim=st.sampled_from([4, 6]),
)
def test_each_rank_gets_all_tokens_of_its_heads_and_gives_them_back(sp, tp, kv, num_tokens, v_dim):
    layout = Layout(sp * tp, sp)
    h = 2 * layout.world_size
    h_kv = {"all": h, "half": layout.world_size, "one": 1}[kv]
    heads = HeadLayout(layout, h, h_kv)
    q, k, v = torch.randn(num_tokens, h, 4), torch.randn(num_tokens, h_kv, 4), torch.randn(num_tokens, h_kv, v_dim)

    for tp_rank in range(tp):  # one SP group after the other
        base_q = q.chunk(tp, 1)[tp_rank]
        first_kv = tp_rank * h_kv // tp
        base_k, base_v = (t[:, first_kv : first_kv + heads.base_kv_heads] for t in (k, v))

        def body(member, sp_rank, base_q=base_q, base_k=base_k, base_v=base_v, tp_rank=tp_rank):
            rank = tp_rank * sp + sp_rank
            part = layout.slice_of(rank, num_tokens)
            got = scatter_heads(member, heads, *(_take(t, 0, part) for t in (base_q, base_k, base_v)), num_tokens)
            own = heads.heads_per_rank
            kv_first = rank * h_kv // layout.world_size
            own_kv = slice(kv_first, kv_first + heads.kv_heads_per_rank)
            expected = (q[:, rank * own : (rank + 1) * own], k[:, own_kv], v[:, own_kv])
            for mine, right in zip(got, expected, strict=True):
                assert mine.is_contiguous()
                assert torch.equal(mine, right.reshape(num_tokens, -1))
            home = gather_heads(member, heads, got[0])
            assert torch.equal(home, _take(base_q, 0, part).reshape(part.rows, -1))

        on_ranks(sp, body)


@settings(deadline=None, max_examples=60)
@given(sp=st.sampled_from([2, 3, 4]), num_tokens=st.integers(1, 20), data=st.data())
def test_rows_that_are_asked_for_come_to_their_place(sp, num_tokens, data):
    layout = Layout(sp, sp)
    hidden = torch.randn(num_tokens, 5)
    rows = data.draw(st.none() | st.sets(st.integers(0, num_tokens - 1), min_size=1).map(sorted))

    def body(member, rank):
        mine = _take(hidden, 0, layout.slice_of(rank, num_tokens))
        return gather_rows(member, mine, num_tokens, sp, rank, rows)

    for gathered in on_ranks(sp, body):
        assert gathered.shape == hidden.shape
        assert torch.equal(gathered[rows or slice(None)], hidden[rows or slice(None)])


@pytest.mark.parametrize("dim", [0, -1])
def test_padding_is_zero_and_never_before_a_token(dim):
    layout = Layout(4, 4)
    tensor = torch.arange(1, 10).repeat(3, 1)
    tensor = tensor if dim == -1 else tensor.T
    parts = [_take(tensor, dim, layout.slice_of(rank, 9)) for rank in range(4)]
    whole = torch.cat(parts, dim)
    assert whole.shape[dim] == 12
    assert torch.equal(whole.narrow(dim, 0, 9), tensor)
    assert not whole.narrow(dim, 9, 3).any()
