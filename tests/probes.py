"""Probes inside a rank: the collectives it makes and the KV pool it holds. Installed by ``Host(in_rank=...)``.

They use SGLang's hooks and torch's functions and know nothing of sgl-shift, so that stock ranks are probed alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# torch's function -> position of the input among its arguments. SGLang gathers through a name that it imported.
_COLLECTIVES = {
    "all_reduce": 0,
    "broadcast": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
    "send": 0,
    "recv": 0,
}


class Probe:
    """Counts device collectives as (operation, ranks of the group) -> calls and bytes of the input."""

    def __init__(self, folder: Path, extra: Callable[[Any], Any] | None = None) -> None:
        self.folder = folder
        self.extra = extra  # called with the idle scheduler when the probe is read; what it returns is part of that
        self.calls: Counter = Counter()
        self.bytes: Counter = Counter()

    def install(self, rank: int) -> None:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for name, position in _COLLECTIVES.items():
            setattr(torch.distributed, name, self._counted(name, position, getattr(torch.distributed, name)))
        parallel_state.all_gather_single = self._counted("all_gather_into_tensor", 1, parallel_state.all_gather_single)
        HookRegistry.register(
            "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController."
            "set_internal_state",
            self._set_internal_state,
            HookType.AROUND,
        )
        HookRegistry.apply_hooks()

    def _counted(self, name: str, position: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position] if len(args) > position else None
            # Schedulers also talk to each other; they send integers.
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                ranks = tuple(torch.distributed.get_process_group_ranks(kwargs.get("group")))
                self.calls[name, ranks] += 1
                self.bytes[name, ranks] += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return counted

    def _set_internal_state(self, original: Callable[..., Any], controller: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput
        from sglang.srt.runtime_context import get_parallel

        if "probe" not in request.server_args:
            return original(controller, request)
        scheduler = controller.scheduler
        extra = self.extra(scheduler) if self.extra else None
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        rank = get_parallel().tp_rank
        path = self.folder / f"{request.server_args['probe']}.rank{rank}.pt"
        torch.save(
            {
                "calls": dict(self.calls),
                "bytes": dict(self.bytes),
                "extra": extra,
                "k": torch.stack([pool.get_key_buffer(i) for i in range(pool.layer_num)]).clone(),
                "v": torch.stack([pool.get_value_buffer(i) for i in range(pool.layer_num)]).clone(),
            },
            path.with_suffix(".part"),
        )
        path.with_suffix(".part").rename(path)  # whoever waits for the file finds it whole
        self.calls.clear()
        self.bytes.clear()
        return SetInternalStateReqOutput(updated=True)
