"""Seconds that one step of a model takes in any (SP, TP), from FLOPs, bytes and collective volumes.

A step is one forward pass of a batch. The formulas are the paper's (section 1.8 of the notes): a rank works on
``n / SP`` of the batch's n tokens with ``1 / TP`` of the weights, on all n in attention with ``1 / P`` of the heads,
sends two all-reduces a layer if TP > 1 and two all-to-alls if SP > 1. No torch, no SGLang.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl_shift.hardware import Profile
from sgl_shift.layout import HeadLayout, Layout
from sgl_shift.shape import ModelShape


class Volumes(NamedTuple):
    """Elements that one GPU sends; ring counting."""

    all_reduce: float  # a layer, both all-reduces
    all_to_all: float  # a layer, there and back
    all_gather: float  # once a forward pass


def volumes(model: ModelShape, layout: Layout, tokens: int) -> Volumes:
    """Collectives of a step of ``tokens`` tokens; the table in section 1.8."""
    sp, tp, world = layout.sp_size, layout.tp_size, layout.world_size
    rows = layout.rows_per_rank(tokens)
    heads = 2 * model.heads + 2 * max(model.kv_heads, world)
    return Volumes(
        all_reduce=4 * (tp - 1) / tp * rows * model.hidden,
        all_to_all=(sp - 1) / sp * rows * heads * model.head_dim / tp,
        all_gather=(sp - 1) * rows * model.hidden,
    )


class Chunk(NamedTuple):
    """Prompt tokens of one sequence in a step."""

    new: int
    past: int = 0  # tokens of the sequence that are already in the KV cache


class Batch(NamedTuple):
    """One step's work."""

    chunks: tuple[Chunk, ...] = ()
    decodes: int = 0  # sequences that generate one token
    context: int = 0  # KV tokens that those read, together

    @property
    def tokens(self) -> int:
        return self.decodes + sum(chunk.new for chunk in self.chunks)


class Parts(NamedTuple):
    """Seconds of a step, by what they are spent on."""

    linear: float
    attention: float
    elementwise: float
    collectives: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(self)


class StepCost:
    """Cost of the steps of one model in one configuration.

    Args:
        layout: P and SP; ``Layout(8, 1)`` is TP=8, ``Layout(8, 8)`` SP=8, ``Layout(1, 1)`` one replica of DP.
        graph_tokens: batches up to this size replay a CUDA graph, larger ones are launched layer by layer.

    Raises:
        LayoutError: heads that cannot be split so.
    """

    def __init__(self, model: ModelShape, profile: Profile, layout: Layout, graph_tokens: int = 512) -> None:
        self.model, self.profile, self.layout, self.graph_tokens = model, profile, layout, graph_tokens
        self.heads = HeadLayout(layout, model.heads, model.kv_heads)
        tp, world = layout.tp_size, layout.world_size
        # K and V columns that several base-TP ranks compute for themselves (KV replication).
        extra = 2 * model.hidden * model.head_dim * (self.heads.base_kv_heads * tp - model.kv_heads) * model.layers
        self._dense = (model.dense_weights + extra) / tp
        self._expert = model.expert_weights * model.moe_layers / tp
        self._head = model.head_weights / world
        hardware, reached = profile.hardware, profile.efficiency
        self._gemm = (hardware.fp8_flops if model.fp8 else hardware.flops) * reached.gemm
        self._bandwidth = hardware.bandwidth * reached.memory
        self._per_key = 4 * model.head_dim * model.heads / world / (hardware.flops * reached.attention)
        self._kv_read = 2 * model.head_dim * self.heads.kv_heads_per_rank * model.kv_itemsize / self._bandwidth
        self._elementwise = self._elementwise_bytes() / self._bandwidth
        self._link = hardware.link * reached.link / model.itemsize  # elements/s
        one = volumes(model, layout, layout.sp_size)  # of one row a rank
        self._sent = (one.all_reduce + one.all_to_all) * model.layers + one.all_gather
        self._sent += 2 * (tp - 1) / tp * model.hidden  # the embedding's all-reduce
        latency = 2 * model.layers * (tp > 1) * reached.all_reduce_latency
        latency += 2 * model.layers * (layout.sp_size > 1) * reached.exchange_latency
        self._latency = latency

    @property
    def kv_bytes(self) -> int:
        """Of the KV cache, a token and rank."""
        model = self.model
        return 2 * model.head_dim * self.heads.kv_heads_per_rank * model.layers * model.kv_itemsize

    def seconds(self, batch: Batch) -> float:
        return self.parts(batch).total

    def parts(self, batch: Batch) -> Parts:
        """Seconds of one step; see :class:`Parts`."""
        tokens, reached, model = batch.tokens, self.profile.efficiency, self.model
        if not tokens:
            return Parts(0, 0, 0, 0, 0)
        rows, sequences = self.layout.rows_per_rank(tokens), batch.decodes + len(batch.chunks)
        linear = max(
            (2 * rows * self._dense + 2 * sequences * self._head) / self._gemm,
            (self._dense * model.linear_itemsize + self._head * model.itemsize) / self._bandwidth,
        )
        if model.experts:
            each = rows * model.experts_per_token
            touched = model.experts * (1 - (1 - model.experts_per_token / model.experts) ** rows)  # if routed evenly
            linear += max(
                2 * each * self._expert / (self._gemm * reached.moe_gemm),
                touched * self._expert * model.linear_itemsize / self._bandwidth,
            )
        elementwise = rows * self._elementwise
        collectives = self._latency + rows * self._sent / self._link
        # Outside of a graph the host launches kernels while the GPU runs: what lasts longer counts.
        attention = self._attention(batch)
        on_gpu = linear + attention + elementwise + collectives + model.layers * reached.layer
        launched = model.layers * reached.eager_layer if tokens > self.graph_tokens else 0.0
        overhead = model.layers * reached.layer + max(0.0, launched - on_gpu)
        overhead += reached.step + reached.sequence * sequences
        return Parts(linear, attention, elementwise, collectives, overhead)

    def _attention(self, batch: Batch) -> float:
        model, seconds = self.model, 0.0
        for layers, window in ((model.layers - model.local_layers, 0), (model.local_layers, model.window)):
            if not layers:
                continue
            for chunk in batch.chunks:
                read = chunk.past + chunk.new if not window else min(chunk.past + chunk.new, window + chunk.new)
                seconds += layers * max(keys(chunk, window) * self._per_key, read * self._kv_read)
            if batch.decodes:
                context = min(batch.context, window * batch.decodes) if window else batch.context
                seconds += layers * max(context * self._per_key, context * self._kv_read)
        return seconds

    def _elementwise_bytes(self) -> float:
        """Bytes that norms, rotary embedding, activation and quantization move, a row and forward pass.

        A norm reads and writes the row and the residual; FP8 reads each GEMM's input once more and writes half of it.
        """
        model, tp = self.model, self.layout.tp_size
        qkv = (model.heads + 2 * model.kv_heads) * model.head_dim / tp
        moe = model.moe_layers / model.layers
        wide = (model.intermediate * (1 - moe) + model.shared_intermediate * moe) / tp
        routed = model.experts_per_token * moe
        wide += routed * model.moe_intermediate / tp
        elements = 8 * model.hidden + 2 * qkv + 3 * wide + 2 * routed * model.hidden
        if model.fp8:
            elements += 1.5 * (2 * model.hidden + model.heads * model.head_dim / tp + wide)
        return elements * model.itemsize * model.layers


def keys(chunk: Chunk, window: int = 0) -> float:
    """Query-key pairs of a chunk under a causal mask: token i of it sees ``past + i``, at most ``window``."""
    new, past = chunk
    if not window or past + new <= window:
        return new * past + new * (new + 1) / 2
    growing = max(0, window - past)  # tokens that see fewer than the window
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * window
