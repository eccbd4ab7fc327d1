"""Which configuration ran: in SGLang's log lines and in /server_info."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_shift_patches import state

logger = logging.getLogger(__name__)

_RESULT_ATTRIBUTE = "shift_configuration"


def alloc_memory_pool(_result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ``ModelRunner.alloc_memory_pool``: what the weights of the base configuration cost in KV tokens."""
    shift = state.current()
    if shift is None or runner.is_draft_worker or shift.rank != 0:
        return
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
