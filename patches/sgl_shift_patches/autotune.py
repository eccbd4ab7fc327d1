"""``--shift-threshold auto``: batches of zeros through both configurations, timed on this model and machine.

Runs when a server starts, before CUDA graphs are captured, and between two batches of a running server. The batches are
those that SGLang warms up with (``runner/base_runner.py:BaseRunner._dummy_run``): they write to the padding slot of the
KV pool, which no request has, and their outputs are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from sgl_shift.config import Kind
from sgl_shift.forward import ShiftParallel
from sgl_shift.ladder import Measured, Step, climb, threshold_of
from sgl_shift.policy import Configuration
from sgl_shift_patches import state

logger = logging.getLogger(__name__)


def at_startup(_result: None, eager_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ``EagerRunner.__init__``: graphs are captured next, each in the configuration that its tokens select."""
    shift, runner = state.current(), eager_runner.model_runner
    if shift is None or runner.is_draft_worker or not shift.config.auto or not shift.base_model:
        return
    eager_runner.warmup()  # kernels are tuned first; with graphs SGLang does this later
    measure(shift, eager_runner, starting=True)


def measure(shift: ShiftParallel, eager_runner: Any, *, starting: bool = False) -> None:
    """Time both configurations and set the thresholds; what was found is in ``shift.measured``. On every rank at once.

    Args:
        starting: graphs are still to be captured. Later, sizes that graphs replay are not timed: what they hold is
            fixed, and thresholds stay where it allows.
    """
    runner, start = eager_runner.model_runner, time.monotonic()
    found: dict[Kind, Measured] = {}
    with shift.stats.paused(), torch.no_grad(), eager_runner.model_context():
        synchronize(runner.device)  # a step of the overlap schedule may still be reading its metadata
        for kind in kinds(runner):
            sizes, replayed = admissible(runner, shift, kind, starting=starting)
            if not sizes:
                found[kind] = Measured(shift.settings.limit(kind), [], "captured graphs hold every size")
                continue
            rungs = climb(shift.layout.sp_size, sizes, Steps(shift, eager_runner, kind, sizes[-1], replayed))
            best = threshold_of(rungs, sizes[-1])
            held = shift.held(kind, best)
            found[kind] = Measured(held, rungs, f"captured graphs cannot follow {best}" if held != best else "")
    decode, prefill = found.get("decode"), found.get("prefill")
    first = decode or prefill
    assert first is not None
    shift.settings = replace(
        shift.settings, threshold=first.threshold, prefill_threshold=prefill.threshold if prefill else None
    )
    shift.measured = found
    if shift.rank == 0:
        _log(found, time.monotonic() - start)


def kinds(runner: Any) -> list[Kind]:
    """Kinds of batches that can be timed. With speculation SGLang has batches of zeros for verification only: its
    threshold holds for all."""
    if not runner.is_generation:
        return ["prefill"]
    return ["decode"] if runner.spec_algorithm.is_speculative() else ["decode", "prefill"]


def admissible(runner: Any, shift: ShiftParallel, kind: Kind, *, starting: bool) -> tuple[Sequence[int], int]:
    """(tokens that a batch of this kind may have and that are worth timing, the largest that a graph will replay)."""
    from sglang.srt.runtime_context import get_exec, get_schedule

    if kind == "prefill":
        schedule = get_schedule()
        chunk = schedule.chunked_prefill_size or 0
        most = min(chunk if chunk > 0 else schedule.max_prefill_tokens, _longest(runner))
        return range(1 + max(shift.captured.get(kind, [0])), most + 1), 0
    width = tokens_per_request(runner)
    graphs = get_exec().graph.cuda_graph_config
    captured: list[int] = []
    if starting and runner.device == "cuda" and graphs is not None and graphs.decode.backend != "disabled":
        captured = sorted(size * width for size in graphs.decode.bs or ())
    largest = max(captured or shift.captured.get(kind, [0]))
    # A graph's size stands for all that are padded to it; above the largest, any number of requests may run.
    return [*captured, *range(largest + width, runner.max_running_requests * width + 1, width)], max(
        captured, default=0
    )


def tokens_per_request(runner: Any) -> int:
    return int(runner.decode_num_tokens_per_req()) if runner.spec_algorithm.is_speculative() else 1


def _longest(runner: Any) -> int:
    """Tokens of a batch that is one request."""
    return int(min(runner.req_to_token_pool.req_to_token.shape[1], runner.max_total_num_tokens))


class Steps:
    """Runs one step of a kind in a configuration. What it answers is the slowest rank's, so all ranks get the same."""

    def __init__(self, shift: ShiftParallel, eager_runner: Any, kind: Kind, most: int, replayed: int = 0) -> None:
        """``most``: tokens of the largest step; up to ``replayed`` a CUDA graph of it is made and replayed."""
        self.shift, self.eager_runner, self.kind, self.replayed = shift, eager_runner, kind, replayed
        self.device = eager_runner.model_runner.device
        self.width = tokens_per_request(eager_runner.model_runner)
        self.most, self.buffers = most, None
        self.graphs: dict[tuple[int, Configuration], Any] = {}

    def __call__(self, tokens: int, configuration: Configuration | None) -> Step:
        """``None`` runs what the settings choose."""
        start = time.perf_counter()
        if configuration is not None and tokens <= self.replayed:
            seconds = self._replayed(tokens, configuration)
        else:
            seconds = self._eager(tokens, configuration)
        return Step(*self._slowest(seconds, time.perf_counter() - start))

    def _eager(self, tokens: int, configuration: Configuration | None) -> float:
        took: list[float] = []
        self._forward(tokens, configuration, timed(self.device, took.append))
        return took[0]

    def _replayed(self, tokens: int, configuration: Configuration) -> float:
        key = tokens, configuration
        if key not in self.graphs:
            seconds = self._eager(tokens, configuration)
            self.graphs[key] = self._captured(tokens, configuration)
            if self._slowest(self.graphs[key] is None)[0]:  # in any rank
                logger.warning("Shift Parallelism: no graph of %d tokens; steps are timed as they are launched", tokens)
                self.graphs.clear()
                self.replayed = 0
                return seconds
        from sglang.srt.runtime_context import get_parallel

        took: list[float] = []
        synchronize(self.device)
        get_parallel().tp_group.barrier()
        with timed(self.device, took.append):
            self.graphs[key].replay()
        return took[0]

    def _captured(self, tokens: int, configuration: Configuration) -> Any:
        """A graph of the forward alone: attention metadata are made outside and stay, as the batch does."""
        from sglang.srt.distributed import parallel_state

        try:
            graph = torch.cuda.CUDAGraph()
            with parallel_state.graph_capture() as context:
                pool = next((other.pool() for other in self.graphs.values()), None)
                self._forward(tokens, configuration, torch.cuda.graph(graph, pool=pool, stream=context.stream))
        except Exception as error:  # whatever it is, steps can be timed without
            logger.warning("Shift Parallelism: %s", error)
            return None
        return graph

    def _forward(self, tokens: int, configuration: Configuration | None, around: AbstractContextManager[Any]) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        runner = self.eager_runner
        if self.buffers is None:
            seq_len_of_padding(runner.model_runner.attn_backend)
            self.buffers = runner._alloc_dummy_decode_buffers(
                -(-self.most // self.width), num_tokens_per_req=self.width, allocate_logits_buffer=False
            )
        with self.shift.forcing(configuration):
            if self.kind == "prefill":  # one request without a prefix
                mode = {"forward_mode_override": ForwardMode.EXTEND, "extend_num_tokens_per_req": tokens}
                runner._dummy_run(batch_size=1, buffers=self.buffers, run_ctx=around, **mode)
            else:
                runner._dummy_run(batch_size=tokens // self.width, buffers=self.buffers, run_ctx=around)

    def _slowest(self, *numbers: float) -> list[float]:
        from sglang.srt.runtime_context import get_parallel

        values = torch.tensor(numbers, dtype=torch.float64)
        group = get_parallel().tp_group.cpu_group
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
        return [float(value) for value in values]


def seq_len_of_padding(backend: Any) -> None:
    """Backends without graphs do not say how long a sequence is that pads a batch; batches of zeros ask."""
    try:
        backend.get_cuda_graph_seq_len_fill_value()
    except NotImplementedError:
        backend.get_cuda_graph_seq_len_fill_value = lambda: 1


def synchronize(device: str) -> None:
    torch.get_device_module(device).synchronize()


@contextmanager
def timed(device: str, report: Callable[[float], Any]) -> Iterator[None]:
    """Report the seconds that the device spends on what runs inside; on a CPU, wall time."""
    if device == "cpu":
        start = time.perf_counter()
        yield
        report(time.perf_counter() - start)
        return
    module = torch.get_device_module(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record()
    yield
    end.record()
    end.synchronize()
    report(begin.elapsed_time(end) / 1e3)


def _log(found: dict[Kind, Measured], seconds: float) -> None:
    for kind, measured in found.items():
        steps = ", ".join(
            f"{rung['tokens']}: {rung['base_ms']:.2f}/{rung['shift_ms']:.2f}" for rung in measured.to_dict()["ladder"]
        )
        logger.info(
            "Shift Parallelism: %s steps of tokens: milliseconds in base/shift: %s. Threshold %d%s",
            kind,
            steps,
            measured.threshold,
            f", because {measured.why}" if measured.why else "",
        )
    logger.info("Shift Parallelism: measured in %.1f s", seconds)
