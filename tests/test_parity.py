"""Base, shift and every way of switching between them against stock SGLang: tokens, logprobs, KV pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints, parity
from tests.checkpoints import DENSE, FEW_KV_HEADS, MISTRAL, MIXTRAL, MOE, QWEN2, Tiny
from tests.hosting import Host
from tests.parity import Requests
from tests.probes import Probe

# Lengths that do and do not divide by SP, one shorter than SP, one of a single token; the requests end one by one.
TOGETHER = Requests.random(1, [5, 17, 64, 33, 1, 130], [8, 2, 5, 3, 8, 6])
# Served one after the other, so that every token gets the same slot in every run.
ALONE = [Requests.random(2, [n], [m]) for n, m in ((33, 6), (101, 3), (2, 9))]

# How to run, and what must have run where: (settings, tokens in base, tokens in shift) as any, none or all.
WAYS = {
    "all base": ({"mode": "sp"}, True, False),
    "all shift": ({"mode": "tp"}, False, True),
    "prefill base, decode shift": ({"mode": "shift", "threshold": 20}, True, True),
    "decode crosses the threshold as requests leave": ({"mode": "shift", "threshold": 3}, True, True),
}

# (model, P, sp): dense GQA, KV heads fewer than ranks, MoE in full; the other architectures where SP and TP mix.
DEPLOYMENTS = [(model, world, sp) for model in (DENSE, FEW_KV_HEADS, MOE) for world, sp in ((2, 2), (4, 4), (4, 2))] + [
    (model, 4, 2) for model in (MISTRAL, QWEN2, MIXTRAL)
]


class Oracle:
    """What stock SGLang answers, once per (model, P): plugin off, same arguments."""

    def __init__(self, checkpoint: Callable[[Tiny], Path], folder: Path) -> None:
        self._checkpoint, self._folder, self._known = checkpoint, folder, {}

    def __call__(self, model: Tiny, world: int) -> dict[str, Any]:
        if (model.name, world) not in self._known:
            folder = self._folder / f"{model.name}-{world}"
            folder.mkdir()
            with Host(
                self._checkpoint(model), world, plugin=False, in_rank=Probe(folder).install, log=folder / "log"
            ) as host:
                alone, pools = run_alone(host, folder)
                host.flush_cache()
                self._known[model.name, world] = {
                    "alone": alone,
                    "pools": pools,
                    "together": parity.run(host, TOGETHER),
                }
        return self._known[model.name, world]


@pytest.fixture(scope="module")
def oracle(checkpoint, tmp_path_factory) -> Oracle:
    return Oracle(checkpoint, tmp_path_factory.mktemp("stock"))


def run_alone(host: Host, folder: Path) -> tuple[list[list[dict[str, Any]]], list[dict[str, torch.Tensor]]]:
    answers = [parity.run(host, requests) for requests in ALONE]
    return answers, [{part: rank[part] for part in "kv"} for rank in host.probe(folder)]


def pools_differ(stock: list[dict[str, torch.Tensor]], ours: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference of a KV value over all ranks, layers and slots, those that nobody wrote included.

    Slot 0 is SGLang's own place for what is to be thrown away.
    """
    assert len(stock) == len(ours)
    return max(
        (a[part][:, 1:] - b[part][:, 1:]).abs().max().item() for a, b in zip(stock, ours, strict=True) for part in "kv"
    )


def ran(host: Host, before: dict[str, Any]) -> dict[str, int]:
    return {name: count - before["tokens"][name] for name, count in host.info()["tokens"].items()}


@pytest.mark.parametrize(("model", "world", "sp"), DEPLOYMENTS, ids=lambda p: getattr(p, "name", p))
def test_every_way_of_running_equals_stock(model, world, sp, oracle, start, tmp_path, record_property):
    stock = oracle(model, world)
    host = start(model, world, sp_size=sp, shift_mode="sp", in_rank=Probe(tmp_path).install)

    alone, pools = run_alone(host, tmp_path)
    assert host.info()["tokens"]["shift"] == 0
    worst = [parity.assert_equal(a, b, cached=True) for a, b in zip(stock["alone"], alone, strict=True)]
    assert pools_differ(stock["pools"], pools) < parity.TOLERANCE

    for name, (settings, some_base, some_shift) in WAYS.items():
        host.set(**settings)
        host.flush_cache()
        before = host.info()
        worst.append(parity.assert_equal(stock["together"], parity.run(host, TOGETHER)))
        tokens = ran(host, before)
        assert (tokens["base"] > 0, tokens["shift"] > 0) == (some_base, some_shift), (name, tokens)
    record_property("worst_logprob_difference", max(worst))
    print(f"{model.name} P={world} SP={sp}: worst logprob difference {max(worst):.1e}")


def test_attention_matters_in_these_checkpoints(oracle, start):
    """Or a wrong head would go unnoticed: without attention, logprobs move by more than 1."""

    def without_attention(_rank: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

        for name in ("forward_extend", "forward_decode"):
            original = getattr(Backend, name)
            setattr(Backend, name, lambda self, *a, _original=original, **k: _original(self, *a, **k) * 0)

    for model in (DENSE, FEW_KV_HEADS, MOE):
        host = start(model, 2, plugin=False, in_rank=without_attention)
        blind = parity.run(host, TOGETHER)
        difference = max(
            abs(a - b)
            for theirs, mine in zip(oracle(model, 2)["together"], blind, strict=True)
            for a, b in zip(theirs["prompt_logprobs"], mine["prompt_logprobs"], strict=True)
        )
        assert difference > 1
        host.close()


# --- negative controls: each fault, put into the ranks of an otherwise healthy engine, must turn the comparison red ---


def swap_two_heads(_rank: int) -> None:
    from sgl_shift import exchange

    pack = exchange.pack_qkv

    def swapped(q, *args):
        order = list(range(q.shape[1]))
        order[0], order[-1] = order[-1], order[0]
        return pack(q[:, order], *args)

    exchange.pack_qkv = swapped


def replicate_the_wrong_kv_head(_rank: int) -> None:
    from sgl_shift.layout import HeadLayout

    right = HeadLayout.kv_head_map.fget
    HeadLayout.kv_head_map = property(lambda self: right(self)[1:] + right(self)[:1])


def forget_moe_tp_group(_rank: int) -> None:
    from contextlib import contextmanager

    from sgl_shift_patches import groups

    @contextmanager
    def scope(base_tp):
        from sglang.srt.distributed.parallel_state import patch_tensor_parallel_group

        with patch_tensor_parallel_group(base_tp, owns_attention=True):
            yield

    groups.base_scope = scope


def write_a_padding_row(_rank: int) -> None:
    from sgl_shift.forward import ShiftParallel

    attend = ShiftParallel.attend

    def careless(self, attention, q, k, v):
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        if self.layout.slice_of(self.rank, self.num_tokens).real < q.shape[0]:
            each = self.heads.kv_heads_per_rank
            get_token_to_kv_pool().get_key_buffer(0)[-1] = k[-1, :each]
        return attend(self, attention, q, k, v)

    ShiftParallel.attend = careless


@pytest.mark.parametrize(
    ("fault", "model", "world", "sp"),
    [
        (swap_two_heads, DENSE, 2, 2),
        (replicate_the_wrong_kv_head, FEW_KV_HEADS, 4, 4),
        (forget_moe_tp_group, MOE, 4, 2),
        (write_a_padding_row, DENSE, 2, 2),
    ],
    ids=lambda p: getattr(p, "__name__", getattr(p, "name", p)),
)
def test_a_fault_turns_the_comparison_red(fault, model, world, sp, oracle, start, tmp_path):
    def in_rank(rank: int) -> None:
        Probe(tmp_path).install(rank)
        fault(rank)

    stock = oracle(model, world)
    host = start(model, world, sp_size=sp, shift_mode="sp", in_rank=in_rank)
    alone, pools = run_alone(host, tmp_path)
    difference = pools_differ(stock["pools"], pools)
    print(f"{fault.__name__}: KV pools differ by {difference:.2g}")
    assert difference > parity.TOLERANCE
    if fault is not write_a_padding_row:  # which nobody reads before it is overwritten
        assert not all(parity.equal(a, b) for a, b in zip(stock["alone"], alone, strict=True))


@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda m: m.name)
def test_without_sp_size_the_plugin_changes_nothing(model, oracle, start, tmp_path):
    stock = oracle(model, 2)
    host = start(model, 2, in_rank=Probe(tmp_path).install)
    alone, pools = run_alone(host, tmp_path)
    assert alone == stock["alone"]  # to the last bit
    assert pools_differ(stock["pools"], pools) == 0
    with pytest.raises(KeyError):
        host.info()


def test_checkpoints_do_not_depend_on_the_run():
    first, second = checkpoints.weights(DENSE), checkpoints.weights(DENSE)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_mode_tp_loads_no_base_model_and_cannot_leave(oracle, start):
    host = start(DENSE, 2, sp_size=2, shift_mode="tp")
    parity.assert_equal(oracle(DENSE, 2)["together"], parity.run(host, TOGETHER))
    info = host.info()
    assert info["weight_bytes"]["base"] == 0
    assert info["tokens"]["base"] == 0
    with pytest.raises(ValueError, match="rejected"):
        host.set(mode="sp")
    host.set(threshold=7)
    assert (host.info()["mode"], host.info()["threshold"]) == ("tp", 7)


def test_data_parallel_replicas_each_shift_by_themselves(oracle, start):
    host = start(DENSE, 2, sp_size=2, dp_size=2, shift_threshold=20)
    parity.assert_equal(oracle(DENSE, 2)["together"], parity.run(host, TOGETHER))
    states = host.call(_internal_states)
    assert len(states) == 2
    for state in states:
        assert state["shift_parallel"]["tokens"]["base"] > 0
    host.set(threshold=9)
    assert [state["shift_parallel"]["threshold"] for state in host.call(_internal_states)] == [9, 9]


def _internal_states(engine: Any) -> list[dict[str, Any]]:
    return engine.get_server_info()["internal_states"]
