"""A CUDA graph, played by torch on a CPU: what a forward did to its tensors, again, without the Python that did it.

A graph replays kernels and collectives on the memory that they were captured with. :class:`Tape` records the aten and
c10d operations of a decoder stack and runs them again on the same tensors, with new values in its inputs. Attention
alone runs as Python, with the batch of the day, as at a break of SGLang's breakable graphs. What a capture forbids
(reading a value on the host) it forbids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "unique", "masked_select", "equal")


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.names: list[str] = []
        self.forward_batch: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in FORBIDDEN:
            raise RuntimeError(f"{func} reads values on the host; a CUDA graph cannot be captured of it")
        output = func(*args, **(kwargs or {}))
        aliases = [value.alias_info for value in func._schema.returns]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        if writes or "c10d" in func._schema.name:
            self._add(name, functools.partial(_again, func, args, kwargs or {}))
        elif not any(aliases) and not name.startswith(("empty", "new_empty")):  # views are there, memory as well
            self._add(name, functools.partial(_again_into, output, func, args, kwargs or {}))
        return output

    def _add(self, name: str, step: Callable[[], None]) -> None:
        self.names.append(name)
        self.steps.append(step)

    def attend(
        self, attention: Callable[..., Any], q: Any, k: Any, v: Any, forward_batch: Any, *rest: Any, **more: Any
    ):
        """A break: attention with this batch now, and with another when the tape is replayed."""
        with _disable_current_modes():
            output = attention(q, k, v, forward_batch, *rest, **more)
        self._add("attention", lambda: output.copy_(attention(q, k, v, self.forward_batch, *rest, **more)))
        return output

    def replay(self, forward_batch: Any) -> None:
        self.forward_batch = forward_batch
        for step in self.steps:
            step()


def _again(func: Any, args: Any, kwargs: Any) -> None:
    for value in tree_leaves(func(*args, **kwargs)):
        if isinstance(value, torch.ScriptObject):  # c10d.Work
            value.wait()


def _again_into(output: Any, func: Any, args: Any, kwargs: Any) -> None:
    for before, now in zip(tree_leaves(output), tree_leaves(func(*args, **kwargs)), strict=True):
        before.copy_(now)


class TapedStack:
    """In front of a decoder stack: the first batch of each size and configuration is recorded, others are replayed."""

    def __init__(self) -> None:
        self.tapes: dict[Any, tuple[Tape, torch.Tensor, torch.Tensor, Any]] = {}
        self.captured: list[Any] = []
        self.replays = 0

    def install(self, runner: Any) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

        from sgl_shift_patches import state

        stack = _resolve_transformer_layer_model(runner.model)
        self.recording: Tape | None = None
        for module in stack.modules():
            if isinstance(module, RadixAttention):
                module.forward = functools.partial(self._attend, module.forward)
        forward = stack.forward

        shift = state.current()

        def taped(input_ids: Any, positions: Any, forward_batch: Any, *rest: Any, **more: Any) -> Any:
            key = shift.settings, forward_batch.forward_mode, len(input_ids)
            if key not in self.tapes:
                inputs = input_ids.clone(), positions.clone()
                self.tapes[key] = (*self._record(forward, *inputs, forward_batch, *rest, **more), *inputs)
                self.captured.append(dict(shift.captured))
                shift.captured.clear()  # what is captured refuses other settings
                return self.tapes[key][1].clone()
            tape, output, *inputs = self.tapes[key]
            for static, now in zip(inputs, (input_ids, positions), strict=True):
                static.copy_(now)
            called = torch.nn.Module.__call__
            torch.nn.Module.__call__ = _raise
            try:
                tape.replay(forward_batch)
            finally:
                torch.nn.Module.__call__ = called
            self.replays += 1
            return output.clone()

        stack.forward = taped

    def _record(self, forward: Callable[..., Any], *args: Any, **more: Any) -> tuple[Tape, Any]:
        from sglang.srt.model_executor.runner_utils import capture_mode

        self.recording, capture_mode.is_capture_mode = Tape(), True
        try:
            with self.recording as tape:
                return tape, forward(*args, **more)
        finally:
            self.recording, capture_mode.is_capture_mode = None, False

    def _attend(self, attention: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if self.recording is None:
            return attention(*args, **more)
        return self.recording.attend(attention, *args, **more)


def _raise(module: Any, *args: Any, **kwargs: Any) -> None:
    raise AssertionError(f"{type(module).__name__} was called while a tape was replayed")
