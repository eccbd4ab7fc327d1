"""Counted, not timed: the collectives of one forward, and the bytes in them, by the formulas of the paper."""

from __future__ import annotations

import pytest

from tests import parity
from tests.checkpoints import DENSE, FEW_KV_HEADS, VOCAB
from tests.parity import Requests
from tests.probes import Probe

FLOAT = 4  # bytes
TOKENS = 37  # a multiple of neither SP degree


def one_prefill(host, folder, logprob_start_len):
    """(calls, bytes) of rank 0 in one prefill of TOKENS tokens and nothing else."""
    requests = Requests.random(3, [TOKENS], [1])
    host.flush_cache()
    host.probe(folder)
    parity.run(host, requests, logprob_start_len)
    seen = host.probe(folder)[0]
    return seen["calls"], seen["bytes"]


@pytest.mark.parametrize("model", [DENSE, FEW_KV_HEADS], ids=lambda m: m.name)
@pytest.mark.parametrize(("world", "sp"), [(2, 2), (4, 4), (4, 2)])
def test_one_base_forward(model, world, sp, start, tmp_path):
    host = start(
        model, world, sp_size=sp, shift_mode="sp", disable_overlap_schedule=True, in_rank=Probe(tmp_path).install
    )
    tp, layers, d = world // sp, model.layers, model.hidden
    rows = -(-TOKENS // sp)
    everyone, sp_group, base_group = tuple(range(world)), tuple(range(sp)), tuple(range(0, world, sp))

    for logprob_start_len, gathered in ((-1, 1), (0, rows)):  # only the last token's row, or all rows
        calls, sent = one_prefill(host, tmp_path, logprob_start_len)
        expected_calls = {
            ("all_to_all_single", sp_group): 2 * layers,
            ("all_gather_into_tensor", sp_group): 1,
            ("all_gather_into_tensor", everyone): 1,  # stock's own, of the logits
        }
        if sp == world:  # the two gathers are in groups of the same ranks
            expected_calls["all_gather_into_tensor", everyone] = 2
        if tp > 1:
            expected_calls["all_reduce", base_group] = 2 * layers + 1  # the embedding is one
        assert calls == expected_calls

        # paper, 1.8: (SP-1)/SP * n/SP * (2h + 2 max(h_kv, P)) u / TP elements leave a rank; the buffer also holds the
        # block that stays.
        heads = 2 * model.heads + 2 * max(model.kv_heads, world)
        assert sent["all_to_all_single", sp_group] == layers * rows * heads * model.head_dim // tp * FLOAT
        logit_rows = 1 if logprob_start_len == -1 else TOKENS
        logits = logit_rows * VOCAB // world * FLOAT
        in_sp = gathered * d * FLOAT
        assert sent["all_gather_into_tensor", sp_group] == in_sp + (logits if sp == world else 0)
        if tp > 1:
            assert sent["all_reduce", base_group] == (2 * layers + 1) * rows * d * FLOAT


@pytest.mark.parametrize("world", [2, 4])
def test_a_shift_forward_makes_the_collectives_of_stock_sglang(world, start, tmp_path):
    def measure(folder, **arguments):
        folder.mkdir()
        host = start(DENSE, world, disable_overlap_schedule=True, in_rank=Probe(folder).install, **arguments)
        seen = [one_prefill(host, folder, start_len) for start_len in (-1, 0)]
        host.close()
        return seen

    stock = measure(tmp_path / "stock", plugin=False)
    assert measure(tmp_path / "shift", sp_size=2, shift_mode="shift", shift_threshold=TOKENS) == stock
