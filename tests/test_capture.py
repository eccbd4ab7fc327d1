"""What a CUDA graph relies on, on real ranks on a CPU: a forward of either configuration is a list of operations on
tensors that stay where they are, and SGLang's capture knows the new groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests import parity
from tests.checkpoints import DENSE, FEW_KV_HEADS
from tests.parity import Requests
from tests.probes import Probe
from tests.tape import TapedStack

# The same lengths, so that what was recorded of the first is replayed for the others. No multiple of SP.
FIRST, SECOND, THIRD = (Requests.random(seed, [37], [4]) for seed in (1, 2, 3))


class Taped:
    """Puts tapes into a rank that is about to load its model."""

    def __init__(self, folder: Any) -> None:
        self.stack = TapedStack()
        self.probe = Probe(folder, self.look)

    def install(self, rank: int) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self.probe.install(rank)
        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool", self.loaded, HookType.AFTER
        )
        HookRegistry.apply_hooks()

    def loaded(self, _result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        self.stack.install(runner)

    def look(self, scheduler: Any) -> dict[str, Any]:
        return {
            "replays": self.stack.replays,
            "operations": [tape.names for tape, *_ in self.stack.tapes.values()],
            "captured": self.stack.captured,
        }


@pytest.mark.parametrize(("model", "world", "sp"), [(DENSE, 4, 2), (FEW_KV_HEADS, 4, 4)], ids=lambda p: str(p)[:12])
def test_a_replay_without_python_answers_as_stock(model, world, sp, start, tmp_path):
    stock = start(model, world, plugin=False)
    expected = [parity.run(stock, requests) for requests in (FIRST, SECOND, THIRD)]
    stock.close()
    host = start(model, world, sp_size=sp, in_rank=Taped(tmp_path).install)
    for mode in ("sp", "tp"):
        host.set(mode=mode)
        for answers, requests in zip(expected, (FIRST, SECOND, THIRD), strict=True):
            host.flush_cache()
            parity.assert_equal(answers, parity.run(host, requests))
    for rank in (rank["extra"] for rank in host.probe(tmp_path)):
        assert rank["replays"] == 2 * (3 * 4 - 2)  # all but the first prefill and decode of each configuration
        layers = model.layers
        graphs = [
            (kind, size, graph)
            for captured in rank["captured"]
            for kind, sizes in captured.items()
            for size, graph in sizes.items()
        ]
        assert [(kind, size, graph.configuration) for kind, size, graph in graphs] == [
            (kind, size, configuration)
            for configuration in ("base", "shift")
            for kind, size in (("prefill", 37), ("decode", 1))
        ]
        for *_, graph in graphs:
            assert (graph.bytes_sent["all_to_all"] > 0) == (graph.configuration == "base")
        for base, names in zip((True, True, False, False), rank["operations"], strict=True):
            assert names.count("attention") == layers
            assert names.count("alltoall_base_") == (2 * layers if base else 0)
            reduced = 2 * layers + 1 if not base or world > sp else 0  # the embedding's as well
            assert names.count("allreduce_") == reduced


def capture_and_warm_up(scheduler: Any) -> dict[str, Any]:
    from sglang.srt.distributed import parallel_state

    from sgl_shift_patches import model_runner, state

    runner, shift = scheduler.tp_worker.model_runner, state.current()
    entered: list[tuple[str, Any]] = []

    @contextmanager
    def enter(group: Any, context: Any = None, stream: Any = None) -> Iterator[Any]:
        entered.append((group.unique_name.split(":")[0], context))
        yield context or "the context"
        entered.append((group.unique_name.split(":")[0], "left"))

    graph_capture = parallel_state.GroupCoordinator.graph_capture
    parallel_state.GroupCoordinator.graph_capture = enter
    with parallel_state.graph_capture() as context:
        inside = len(entered)
    parallel_state.GroupCoordinator.graph_capture = graph_capture

    ran: list[Any] = []
    model_runner.in_both_configurations(lambda graph_runner: ran.append(str(shift.forced)), runner.eager_runner)
    before = dict(shift.stats.batches)
    model_runner.run_base_once(runner, shift)
    return {
        "context": context,
        "entered": entered[:inside],
        "left": len(entered) - inside,
        "forced": [*ran, shift.forced],
        "ran": {str(c): n - before[c] for c, n in shift.stats.batches.items()},
    }


def test_capture_and_warm_up_know_both_configurations(start, tmp_path):
    host = start(DENSE, 4, sp_size=2, in_rank=Probe(tmp_path, capture_and_warm_up).install)
    answers = parity.run(host, FIRST)
    for rank in (rank["extra"] for rank in host.probe(tmp_path)):
        assert rank["context"] == "the context"
        assert [name for name, _ in rank["entered"]][-2:] == ["shift_sp", "shift_base_tp"]
        assert all(context == "the context" for _, context in rank["entered"][1:])
        assert rank["left"] == len(rank["entered"])
        assert rank["forced"] == ["base", "shift", None]
        assert rank["ran"] == {"base": 1, "shift": 0}
    host.flush_cache()
    parity.assert_equal(answers, parity.run(host, FIRST))
