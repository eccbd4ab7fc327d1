"""``sglang.Engine``: keyword arguments, and threshold and mode at run time."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from sgl_shift_patches import cli, control

_MODULE = "sglang.srt.entrypoints.engine"


def set_shift_parallel(self: Any, *, threshold: int | None = None, mode: str | None = None) -> None:
    """Set threshold and/or mode of a running Engine; all ranks change between the same two batches.

    Raises:
        ConfigError: a mode that does not exist.
        ValueError: the ranks rejected the change; their log says why.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReq

    changes = {control.THRESHOLD: threshold, control.MODE: mode}
    changes = control.encode({key: value for key, value in changes.items() if value is not None})
    request = SetInternalStateReq(server_args=changes)
    if not all(self.loop.run_until_complete(self.tokenizer_manager.set_internal_state(request))):
        raise ValueError(f"the ranks rejected threshold={threshold!r}, mode={mode!r}; the scheduler's log says why")


def extend() -> None:
    """Give ``Engine`` its keyword arguments and method.

    ``server_args_class`` is SGLang's own place for this. Scheduler processes are spared the import.
    """
    if multiprocessing.parent_process() is not None and _MODULE not in sys.modules:
        return
    from sglang.srt.entrypoints.engine import Engine

    Engine.server_args_class = staticmethod(cli.server_args_from_kwargs)
    Engine.set_shift_parallel = set_shift_parallel
