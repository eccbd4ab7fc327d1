"""One batch through Shift Parallelism: the decision (Algorithm 2) and the base forward (Algorithm 1).

Works on tensors, groups and two callables (the decoder stack of either configuration). What an SGLang batch looks like
is translated by ``sgl_shift_patches.model_runner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from sgl_shift.config import Kind, Settings, ShiftConfig
from sgl_shift.exchange import CountedGroup, Group, gather_heads, gather_rows, scatter_heads
from sgl_shift.ladder import Measured
from sgl_shift.layout import HeadLayout, Layout, Slice
from sgl_shift.policy import Configuration, choose
from sgl_shift.stats import Exporter, Stats
from sgl_shift.storage import SharedWeight

# Arguments of a decoder stack that have one row a token, and the dimension in which they have it. mrope positions are
# [3, tokens]; everything else counts tokens first.
TOKEN_DIM: dict[str, int] = {
    "input_ids": 0,
    "positions": -1,
    "input_embeds": 0,
    "inputs_embeds": 0,
    "input_deepstack_embeds": 0,
}


class Batch(NamedTuple):
    """One forward pass, as the decision and the base configuration need to know it."""

    arguments: dict[str, Any]  # what the decoder stack is called with, by name
    num_tokens: int
    base_can_run: bool
    # Rows of the hidden states that are needed afterwards, None for all; asked in the base configuration only, so that
    # a stock batch does not pay for it.
    rows: Callable[[], Sequence[int] | None]
    kind: Kind = "decode"
    captured: bool = False  # of it a CUDA graph is made, for which the batch stands with its padded tokens


class Captured(NamedTuple):
    """What a CUDA graph replays."""

    configuration: Configuration
    chosen: bool  # by the settings of then; not because the base model could not take the batch
    bytes_sent: dict[str, int]  # by one replay, of this rank


@dataclass
class ShiftParallel:
    """Everything Shift Parallelism knows in one rank. One per process, made when the model is loaded."""

    config: ShiftConfig
    layout: Layout
    rank: int
    sp_group: Group
    # Entered around every forward of the base model: makes SGLang's parallel state that of the base configuration.
    base_scope: Callable[[], AbstractContextManager[Any]]
    # Debug mode: compares what the ranks are about to do and raises on the first difference.
    agree: Callable[[Configuration, int], None] | None = None
    stats: Stats = field(default_factory=Stats)
    exporter: Exporter | None = None
    base_model: list[nn.Module] = field(default_factory=list)  # in a list, or it would become part of a module tree
    heads: HeadLayout | None = None
    shared: list[SharedWeight] = field(default_factory=list)
    why_separate: str = ""  # why the base model has weights of its own, if it has
    weight_bytes: dict[str, int] = field(default_factory=dict)
    captured: dict[Kind, dict[int, Captured]] = field(default_factory=dict)  # by kind of graph and padded tokens
    forced: Configuration | None = None  # for batches that warm kernels up or are timed
    measured: dict[Kind, Measured] = field(default_factory=dict)  # empty where the user set the threshold
    # SGLang's groups of the base configuration, which take part in the capture of graphs.
    coordinators: tuple[Any, ...] = ()
    num_tokens: int = 0  # tokens of the base forward in progress, 0 outside of one
    settings: Settings = field(init=False)

    def __post_init__(self) -> None:
        self.settings = self.config.settings
        self.sp_group = CountedGroup(self.sp_group, self.layout.sp_size, self.stats)

    @property
    def in_base(self) -> bool:
        return self.num_tokens > 0

    def run(self, stock: Callable[..., Any], base: Callable[..., Any], batch: Batch) -> Any:
        """Algorithm 2: run one batch in the configuration that it belongs in.

        Args:
            stock, base: the decoder stack of the shift and of the base configuration; called with
                ``batch.arguments``, they return hidden states [T, d], or tuples and lists of such.
        """
        able = batch.base_can_run and bool(self.base_model)
        configuration = choose(self.settings, batch.num_tokens, base_can_run=able, kind=batch.kind)
        if self.forced is not None and able:
            configuration = self.forced
        if self.agree is not None:
            self.agree(configuration, batch.num_tokens)
        if batch.captured:
            return self._capture(configuration, able, stock, base, batch)
        if batch.num_tokens:
            self.stats.record(configuration, batch.num_tokens, self._padding(configuration, batch.num_tokens))
        return self._run(configuration, stock, base, batch)

    def _run(
        self, configuration: Configuration, stock: Callable[..., Any], base: Callable[..., Any], batch: Batch
    ) -> Any:
        with span(configuration):
            if configuration is Configuration.SHIFT:
                return stock(**batch.arguments)
            return self._run_base(base, batch)

    def _padding(self, configuration: Configuration, num_tokens: int) -> int:
        return -num_tokens % self.layout.sp_size if configuration is Configuration.BASE else 0

    def _capture(
        self,
        configuration: Configuration,
        chosen: bool,
        stock: Callable[..., Any],
        base: Callable[..., Any],
        batch: Batch,
    ) -> Any:
        """Run a batch that a graph is captured of: not a batch that counts, but what its replays will be counted as."""
        before = dict(self.stats.bytes_sent)
        with self.stats.paused():
            output = self._run(configuration, stock, base, batch)
            sent = {kind: now - before[kind] for kind, now in self.stats.bytes_sent.items()}
        self.captured.setdefault(batch.kind, {})[batch.num_tokens] = Captured(configuration, chosen, sent)
        return output

    @contextmanager
    def forcing(self, configuration: Configuration | None) -> Iterator[None]:
        """Inside, batches that base can take run in ``configuration``; None: as the settings choose."""
        self.forced = configuration
        try:
            yield
        finally:
            self.forced = None

    def record_replay(self, kind: Kind, num_tokens: int) -> None:
        """Count a batch that a graph ran: the smallest that it fits in, to which SGLang pads it."""
        graphs = self.captured.get(kind, {})
        size = min((size for size in graphs if size >= num_tokens), default=None)
        configuration = Configuration.SHIFT if size is None else graphs[size].configuration
        padding = 0
        if size is not None and configuration is Configuration.BASE:
            padding = size - num_tokens + self._padding(configuration, size)
            for collective, sent in graphs[size].bytes_sent.items():
                self.stats.bytes_sent[collective] += sent
        self.stats.record(configuration, num_tokens, padding)
        with span(configuration):  # a mark in the trace, right after the step that it is about
            pass

    def graphs(self) -> dict[str, dict[str, list[int]]]:
        """Padded tokens of the captured graphs, by kind and by the configuration that they hold."""
        held: dict[str, dict[str, list[int]]] = {}
        for kind, graphs in self.captured.items():
            for size in sorted(graphs):
                held.setdefault(kind, {}).setdefault(str(graphs[size].configuration), []).append(size)
        return held

    def frozen(self, settings: Settings) -> dict[Kind, list[int]]:
        """Padded tokens of the captured graphs, by kind, that belong in the other configuration by ``settings``."""
        return {
            kind: sizes
            for kind, graphs in self.captured.items()
            if (
                sizes := sorted(
                    size
                    for size, graph in graphs.items()
                    if graph.chosen and choose(settings, size, base_can_run=True, kind=kind) is not graph.configuration
                )
            )
        }

    def held(self, kind: Kind, threshold: int) -> int:
        """The threshold next to ``threshold`` that the captured graphs of a kind can follow."""
        chosen = {size: graph.configuration for size, graph in self.captured.get(kind, {}).items() if graph.chosen}
        above = max((size for size, c in chosen.items() if c is Configuration.SHIFT), default=1)
        below = min((size - 1 for size, c in chosen.items() if c is Configuration.BASE), default=threshold)
        return max(min(threshold, below), above)

    def _run_base(self, base: Callable[..., Any], batch: Batch) -> Any:
        """Algorithm 1: this rank's slice of the batch through the base model, then the needed rows, gathered."""
        part = self.layout.slice_of(self.rank, batch.num_tokens)
        mine = {
            name: _take(value, TOKEN_DIM[name], part) if name in TOKEN_DIM and value is not None else value
            for name, value in batch.arguments.items()
        }
        self.num_tokens = batch.num_tokens
        try:
            with self.base_scope():
                hidden = base(**mine)
        finally:
            self.num_tokens = 0
        rows = None if batch.captured else batch.rows()  # which rows are needed changes from replay to replay
        return self._gather(hidden, batch.num_tokens, rows)

    def _gather(self, hidden: Any, num_tokens: int, rows: Sequence[int] | None) -> Any:
        if isinstance(hidden, (tuple, list)):  # hidden states and auxiliary ones
            return type(hidden)(self._gather(part, num_tokens, rows) for part in hidden)
        if hidden is None:
            return None
        layout = self.layout
        return gather_rows(self.sp_group, hidden, num_tokens, layout.sp_size, layout.sp_rank(self.rank), rows)

    def attend(
        self, attention: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one layer in the base configuration (Algorithm 1, steps 3 to 5).

        Args:
            attention: the stock layer of the shift configuration, on all tokens of this rank's own heads.
            q, k, v: [rows, heads, head_dim] of the base rank's heads, padding rows included.

        Returns:
            [rows, heads * v_head_dim].
        """
        assert self.heads is not None
        output = attention(*scatter_heads(self.sp_group, self.heads, q, k, v, self.num_tokens))
        return gather_heads(self.sp_group, self.heads, output.reshape(self.num_tokens, -1))

    def report(self) -> dict[str, Any]:
        """What ``/server_info`` shows of this rank; plain values only."""
        return {
            "world_size": self.layout.world_size,
            "sp_size": self.layout.sp_size,
            "base_tp_size": self.layout.tp_size,
            "threshold": self.settings.threshold,
            "prefill_threshold": self.settings.limit("prefill"),
            "measured": {kind: found.to_dict() for kind, found in self.measured.items()},
            "mode": self.settings.mode,
            "kv_replication": self.heads.kv_replication if self.heads else 1,
            "weight_bytes": dict(self.weight_bytes),
            "separate_weights": self.why_separate,
            "graphs": self.graphs(),
            **self.stats.to_dict(),
        }


def span(configuration: Configuration) -> AbstractContextManager[Any]:
    """A span in the trace that is being recorded, if one is."""
    recording = torch.autograd._profiler_enabled()
    return torch.profiler.record_function(f"shift_parallel[{configuration}]") if recording else nullcontext()


def _take(tensor: torch.Tensor, dim: int, part: Slice) -> torch.Tensor:
    """This rank's rows of ``tensor`` along ``dim``, padded with zeros to ``part.rows``."""
    mine = tensor.narrow(dim, min(part.start, tensor.shape[dim]), part.real)
    if part.real == part.rows:
        return mine
    shape = list(mine.shape)
    shape[dim] = part.rows
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, part.real).copy_(mine)
    return padded
