"""``sglang.Engine``: keyword arguments, and threshold and mode at run time."""

from __future__ import annotations

import sys
from typing import Any

from sgl_shift_patches import cli, control


def set_shift_parallel(self: Any, *, threshold: int | str | None = None, mode: str | None = None) -> None:
    """Set threshold and/or mode of a running Engine; all ranks change between the same two batches.

    Args:
        threshold: tokens, or ``"auto"`` to measure both configurations again, for some seconds between two batches;
            ``get_server_info()`` shows what was found.

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


class ServerArgsDoor:
    """``Engine.server_args_class``: makes ServerArgs, and is ServerArgs to whoever looks at it."""

    def __call__(self, **kwargs: Any) -> Any:
        return cli.server_args_from_kwargs(**kwargs)

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.server_args import ServerArgs

        return getattr(ServerArgs, name)

    def __instancecheck__(self, instance: Any) -> bool:
        from sglang.srt.server_args import ServerArgs

        return isinstance(instance, ServerArgs)


def extend() -> None:
    """Give ``Engine`` its keyword arguments and method, through the attribute that SGLang has for this.

    An Engine loads plugins as it is made, so its module is there whenever this matters; others are spared the import.
    """
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is not None:
        module.Engine.server_args_class = ServerArgsDoor()
        module.Engine.set_shift_parallel = set_shift_parallel
