"""Which configuration ran: in SGLang's log lines and in /server_info."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_shift.forward import ShiftParallel
from sgl_shift_patches import state

logger = logging.getLogger(__name__)

_RESULT_ATTRIBUTE = "shift_configuration"


def alloc_memory_pool(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``ModelRunner.alloc_memory_pool``: what the weights of the base configuration cost in KV tokens, and who
    takes what where no room is left."""
    shift = state.current()
    if shift is None or runner.is_draft_worker:
        original(runner, *args, **kwargs)
        return
    try:
        original(runner, *args, **kwargs)
    except RuntimeError as error:  # "Not enough memory", pool_configurator.py:MemoryPoolConfig
        raise RuntimeError(f"{error}\n{who_takes_what(shift)}") from error
    if shift.rank == 0:
        _log_kv_tokens(shift, runner)


def who_takes_what(shift: ShiftParallel) -> str:
    """The weights of a rank, and what smaller SP degrees would take; for an operator who is short of memory."""
    held, layout = shift.weight_bytes, shift.layout
    lines = [
        f"Shift Parallelism holds {held['resident'] / 1e9:.3f} GB of weights a rank with SP={layout.sp_size}, "
        f"TP={layout.tp_size}; stock TP={layout.world_size} takes {held['shift'] / 1e9:.3f} GB."
    ]
    if held["base"]:
        lines[0] += " Less:"
        outside = held["resident"] - held["base"]
        for sp_size in sorted((d for d in range(2, layout.sp_size) if layout.sp_size % d == 0), reverse=True):
            needed = held["base"] * sp_size / layout.sp_size + outside
            lines.append(f"  --sp-size {sp_size}: about {needed / 1e9:.3f} GB")
        lines.append(f"  --shift-mode tp: {held['shift'] / 1e9:.3f} GB, without the base configuration")
    return "\n".join(lines)


def _log_kv_tokens(shift: ShiftParallel, runner: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    tokens = runner.max_total_num_tokens
    pool_bytes = runner.token_to_kv_pool_allocator.get_kvcache().mem_usage * (1 << 30)
    more = shift.weight_bytes["resident"] - shift.weight_bytes["shift"]
    lost = int(more / (pool_bytes / tokens)) if pool_bytes and tokens else 0
    limit = resolving_view(runner.server_args).max_total_tokens
    stock = tokens + lost if limit is None else min(tokens + lost, max(limit, tokens))
    logger.info("Shift Parallelism: %d KV tokens fit; stock TP would have about %d", tokens, stock)


def run_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.run_batch``: the result is looked at one batch later under the overlap schedule."""
    shift = state.current()
    before = shift.stats.total if shift is not None else 0
    result = original(scheduler, *args, **kwargs)
    if shift is not None and result is not None and shift.stats.total > before:
        setattr(result, _RESULT_ATTRIBUTE, shift.stats.last)
    return result


def process_batch_result(
    original: Callable[..., Any], processor: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> Any:
    """Around the two result handlers that print 'Prefill batch' and 'Decode batch'.

    Both lines print ``_graph_backend_label`` before a flag; the configuration is put in front of that label.
    """
    configuration = getattr(result, _RESULT_ATTRIBUTE, None)
    if configuration is None:
        return original(processor, batch, result, *args, **kw)
    reporter = processor.metrics_reporter
    label = reporter._graph_backend_label
    reporter._graph_backend_label = f"configuration: {configuration}, {label}"
    try:
        return original(processor, batch, result, *args, **kw)
    finally:
        reporter._graph_backend_label = label


def get_internal_state(output: Any, _controller: Any, *args: Any) -> Any:
    """After ``SchedulerInternalStateController.get_internal_state``."""
    shift = state.current()
    if shift is not None:
        output.internal_state["shift_parallel"] = shift.report()
    return output
