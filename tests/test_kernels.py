"""The Triton kernels in Triton's interpreter against the torch reference, bit for bit, and what they read and write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_shift.layout import HeadLayout, Layout, LayoutError
from sgl_shift_kernels import launchers, pack_output, pack_qkv, reference, triton_kernels, unpack_output, unpack_qkv
from sgl_shift_kernels.triton_kernels import WORDS, Launch, Tile
from tests.interpreter import interpreted_kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with interpreted_kernels():
        yield


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern can occur, those of NaN too."""
    return torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(WORDS[tensor.element_size()])


class Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sp: int
    kv_head_map: list[list[int]]
    tile: Tile


@st.composite
def cases(draw: Any, dtypes: Sequence[torch.dtype]) -> Case:
    """Slices of a fused QKV output with something between them and behind them."""
    dtype, n, sp = draw(st.sampled_from(dtypes)), draw(st.integers(0, 7)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    copies = draw(st.sampled_from([c for c in range(1, sp + 1) if sp % c == 0]))
    each, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2)) * sp
    head_dim, v_head_dim = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    gap, kv_heads = draw(st.integers(0, 3)), sp // copies * each
    widths = [gap, heads * head_dim, kv_heads * head_dim, gap, kv_heads * v_head_dim, gap]
    _, q, k, _, v, _ = random_bits(dtype, n, sum(widths)).split(widths, dim=1)
    tile = Tile(draw(st.sampled_from([2, 4])), draw(st.sampled_from([16, 64])))
    kv_head_map = [list(range(s // copies * each, (s // copies + 1) * each)) for s in range(sp)]
    q, k, v = (t.unflatten(1, (-1, d)) for t, d in ((q, head_dim), (k, head_dim), (v, v_head_dim)))
    return Case(q, k, v, sp, kv_head_map, tile)


def widths_behind(case: Case) -> tuple[int, int, int]:
    each = len(case.kv_head_map[0])
    return case.q.shape[1] // case.sp * case.q.shape[2], each * case.k.shape[2], each * case.v.shape[2]


@settings(deadline=None, max_examples=40)
@given(case=cases(DTYPES), data=st.data())
def test_kernels_do_what_the_reference_does(case, data):
    q, k, v, sp, kv_head_map, tile = case
    send = pack_qkv(q, k, v, sp, kv_head_map)
    assert torch.equal(bits(triton_kernels.pack_qkv(*case)), bits(send))

    tokens = data.draw(st.integers(0, sp * len(q)))
    there = triton_kernels.unpack_qkv(send, tokens, *widths_behind(case), tile)
    for mine, right in zip(there, unpack_qkv(send, tokens, *widths_behind(case)), strict=True):
        assert mine.is_contiguous()
        assert torch.equal(bits(mine), bits(right))

    output = random_bits(q.dtype, tokens, send.shape[2] + 2)[:, 1:-1]  # rows are not contiguous
    back = pack_output(output, sp, len(q))
    assert torch.equal(bits(triton_kernels.pack_output(output, sp, len(q), tile)), bits(back))
    assert torch.equal(bits(triton_kernels.unpack_output(back, tile)), bits(unpack_output(back)))


class Accesses:
    """Addresses that interpreted kernels load from and store to, masked lanes left out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import interpreter_builder as builder

        self.loads: list[int] = []
        self.stores: list[int] = []
        load, store = builder.create_masked_load, builder.create_masked_store

        def recorded_load(pointers: Any, mask: Any, *args: Any, **more: Any) -> Any:
            self.loads += pointers.data[mask.data].tolist()
            return load(pointers, mask, *args, **more)

        def recorded_store(pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
            self.stores += pointers.data[mask.data].tolist()
            return store(pointers, value, mask, *args)

        patch.setattr(builder, "create_masked_load", recorded_load)
        patch.setattr(builder, "create_masked_store", recorded_store)

    def of(self, launch: Launch) -> tuple[list[int], list[int]]:
        self.loads, self.stores = [], []
        launch.run()
        return sorted(self.loads), sorted(self.stores)


def addresses(*tensors: torch.Tensor) -> list[int]:
    found: list[int] = []
    for tensor in tensors:
        at = torch.tensor(tensor.data_ptr())
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            at = at.unsqueeze(-1) + torch.arange(size) * stride * tensor.element_size()
        found += at.flatten().tolist()
    return sorted(found)


@settings(deadline=None, max_examples=20)
@given(case=cases([torch.bfloat16, torch.float8_e5m2]), data=st.data())
def test_each_input_is_read_once_and_each_output_written_once(case, data):
    q, k, v, sp, kv_head_map, tile = case
    tokens = data.draw(st.integers(0, sp * len(q)))
    with pytest.MonkeyPatch.context() as patch:
        accesses = Accesses(patch)
        send, launch = triton_kernels.plan_pack_qkv(q, k, v, sp, kv_head_map, tile)
        assert accesses.of(launch) == (addresses(q, k, v), addresses(send))
        *there, launch = triton_kernels.plan_unpack_qkv(send, tokens, *widths_behind(case), tile)
        assert accesses.of(launch) == (addresses(send.flatten(0, 1)[:tokens]), addresses(*there))
        back, launch = triton_kernels.plan_pack_output(there[0], sp, len(q), tile)
        assert accesses.of(launch) == (addresses(there[0]), addresses(back))
        home, launch = triton_kernels.plan_unpack_output(back, tile)
        assert accesses.of(launch) == (addresses(back), addresses(home))


def test_the_tile_that_serves_copies_a_real_layer():
    """The default tile, on rows and widths that do not fill it: Qwen3-30B-A3B on 8 ranks, two of which share a head."""
    heads = HeadLayout(Layout(8, 8), 32, 4)
    q, k, v = (t.unflatten(1, (-1, 128)) for t in random_bits(torch.bfloat16, 17, 40 * 128).split([4096, 512, 512], 1))
    send = reference.pack_qkv(q, k, v, 8, heads.kv_head_map)
    assert torch.equal(bits(triton_kernels.pack_qkv(q, k, v, 8, heads.kv_head_map)), bits(send))
    there = triton_kernels.unpack_qkv(send, 130, 512, 128, 128)
    for mine, right in zip(there, reference.unpack_qkv(send, 130, 512, 128, 128), strict=True):
        assert torch.equal(bits(mine), bits(right))
    back = triton_kernels.pack_output(there[0], 8, 17)
    assert torch.equal(bits(back), bits(reference.pack_output(there[0], 8, 17)))
    assert torch.equal(bits(triton_kernels.unpack_output(back)), bits(reference.unpack_output(back)))


def test_the_kernel_takes_every_map_of_a_head_layout():
    taken = 0
    for world in (1, 2, 3, 4, 6, 8, 12, 16):
        for sp in (sp for sp in range(1, world + 1) if world % sp == 0):
            for kv_heads in (1, 2, 3, 4, 6, 8, 16, 24):
                try:
                    heads = HeadLayout(Layout(world, sp), 48 * 16, kv_heads)
                except LayoutError:
                    continue
                kv = torch.empty(1, heads.base_kv_heads, 1)
                q = torch.empty(1, 48 * 16 // heads.layout.tp_size, 1)
                triton_kernels.plan_pack_qkv(q, kv, kv, sp, heads.kv_head_map)
                taken += 1
    assert taken > 100


def test_the_kernel_refuses_a_map_that_is_not_even():
    q, kv = torch.empty(1, 2, 4), torch.empty(1, 2, 4)
    with pytest.raises(ValueError, match=r"\[\[1\], \[0\]\] does not give 2 KV heads out evenly and in order to 2 SP"):
        triton_kernels.pack_qkv(q, kv, kv, 2, [[1], [0]])


Q, KV = torch.empty(3, 4, 8), torch.empty(3, 2, 8)
BLOCKS = torch.empty(2, 3, 10)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pack_qkv(Q.flatten(1), KV, KV, 2, [[0], [1]]), r"q must be \[n, heads, head_dim\], not \[3, 32\]"),
        (lambda: pack_qkv(Q, KV[:2], KV, 2, [[0], [1]]), "k has 2 rows, q 3"),
        (lambda: pack_qkv(Q, KV, KV.half(), 2, [[0], [1]]), "v is torch.float16, q torch.float32"),
        (lambda: pack_qkv(Q, KV, KV.to("meta"), 2, [[0], [1]]), "v is on meta, q on cpu"),
        (
            lambda: pack_qkv(Q.transpose(1, 2), KV, KV, 2, [[0], [1]]),
            r"heads of a row of q must be adjacent.*\(32, 1, 8",
        ),
        (lambda: pack_qkv(Q[:, ::2], KV, KV, 2, [[0], [1]]), "heads of a row of q must be adjacent"),
        (lambda: pack_qkv(Q, KV, KV, 3, [[0], [1], [1]]), "4 query heads cannot be split over 3 SP ranks"),
        (lambda: pack_qkv(Q, KV, KV[:, :1], 2, [[0], [1]]), "k has 2 heads and v 1"),
        (lambda: pack_qkv(Q, KV, KV, 2, [[0]]), "for each of 2 SP ranks"),
        (lambda: pack_qkv(Q, KV, KV, 2, [[0], [2]]), "neighbouring KV heads of the 2"),
        (lambda: pack_qkv(Q, KV, KV, 2, [[1, 0], [0, 1]]), "neighbouring KV heads"),
        (lambda: unpack_qkv(BLOCKS[:, :2], 3, 6, 2, 2), r"must be contiguous: strides \(30, 10, 1\)"),
        (lambda: unpack_qkv(BLOCKS[0], 3, 6, 2, 2), r"must be \[sp, n, width\], not \[3, 10\]"),
        (lambda: unpack_qkv(BLOCKS, 3, 6, 2, 3), r"widths \(6, 2, 3\) must be positive and add up to 10"),
        (lambda: unpack_qkv(BLOCKS, 7, 6, 2, 2), "7 tokens do not lie in the 6 rows"),
        (lambda: pack_output(BLOCKS[0].T, 2, 5), r"a row of output must be contiguous: strides \(1, 10\)"),
        (lambda: pack_output(BLOCKS[0], 2, 1), "3 tokens do not fit in 2 x 1 rows"),
        (lambda: unpack_output(BLOCKS.transpose(0, 1)), "must be contiguous"),
    ],
)
def test_what_the_launchers_refuse(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_triton_serves_cuda_and_the_reference_everything_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    on = [SimpleNamespace(is_cuda=True, get_device=lambda device=device: device) for device in (0, 1)]
    assert launchers._implementation(on[1]) is triton_kernels
    assert launchers._implementation(Q) is reference
    with pytest.raises(ValueError, match=r"on cuda:0 .* current device, cuda:1; call torch.cuda.set_device\(0\) first"):
        launchers._implementation(on[0])


def test_a_cpu_needs_no_triton():
    program = """
import sys
sys.modules["triton"] = None  # an import would fail
import torch
from sgl_shift import exchange
from sgl_shift_kernels import pack_qkv
assert pack_qkv(torch.ones(3, 4, 8), torch.ones(3, 1, 8), torch.ones(3, 1, 8), 2, [[0], [0]]).shape == (2, 3, 32)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_without_padding_the_output_is_sent_from_where_it_is():
    output = torch.empty(6, 5)
    assert pack_output(output, 2, 3).data_ptr() == output.data_ptr()


def test_offsets_beyond_32_bits():
    """Three rows 1 GiB apart, hardly touched: the stride fits in 32 bits, the last offset does not."""
    apart = 2**30 + 64
    memory = torch.empty(2 * apart + 16, dtype=torch.uint8)
    rows = memory.as_strided((3, 16), (apart, 1)).copy_(random_bits(torch.float8_e5m2, 3, 16).view(torch.uint8))
    output = rows.view(torch.float8_e5m2)
    assert torch.equal(bits(triton_kernels.pack_output(output, 2, 2)), bits(reference.pack_output(output, 2, 2)))
    q = output.unflatten(1, (2, 8))
    mine = triton_kernels.pack_qkv(q, q, q, 2, [[0], [1]])
    assert torch.equal(bits(mine), bits(reference.pack_qkv(q, q, q, 2, [[0], [1]])))
