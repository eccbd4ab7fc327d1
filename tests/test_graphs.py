"""Which CUDA graphs are captured. Capturing itself needs a GPU; what is asked for does not."""

from __future__ import annotations

import pytest

from sgl_shift.config import Settings, ShiftConfig
from sgl_shift_patches import resolution
from tests.hosting import import_sglang


def limited(settings: Settings, decode: list[int], prefill: list[int]):
    """(decode, prefill) phases after the limit, and the largest batch that a graph may replay."""
    import_sglang()
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path="none")
    graphs = CudaGraphConfig(
        decode=PhaseConfig(backend="full", bs=decode, max_bs=decode[-1]),
        prefill=PhaseConfig(backend="breakable", bs=prefill, max_bs=prefill[-1]),
    )
    declare_resolution(server_args, "test", cuda_graph_config=graphs)
    resolution.limit_graphs(server_args, ShiftConfig(2, settings))
    now = resolving_view(server_args).cuda_graph_config
    assert graphs.decode.bs == decode  # what was there before is not written to
    return now.decode, now.prefill, resolution.captured_tokens(server_args)


def test_graphs_that_hold_stock_tp_end_at_the_threshold():
    decode, prefill, captured = limited(Settings(threshold=250), [1, 128, 248, 256, 512], [4, 256, 8192])
    assert (decode.backend, decode.bs, decode.max_bs) == ("full", [1, 128, 248], 248)
    assert (prefill.backend, prefill.bs, prefill.max_bs) == ("breakable", [4], 4)
    assert captured == 248


def test_a_threshold_below_every_bucket_leaves_no_graph():
    decode, prefill, captured = limited(Settings(threshold=3), [1, 2, 4], [4, 8])
    assert (decode.bs, decode.max_bs) == ([1, 2], 2)
    assert prefill.backend == "disabled"
    assert captured == 2


def test_always_base_captures_nothing():
    decode, prefill, captured = limited(Settings(mode="sp"), [1, 2, 4], [4, 8])
    assert (decode.backend, prefill.backend, captured) == ("disabled", "disabled", 0)


@pytest.mark.parametrize("threshold", [8192, 100_000])
def test_graphs_within_the_threshold_are_as_sglang_made_them(threshold):
    decode, prefill, captured = limited(Settings(threshold=threshold), [1, 512], [4, 8192])
    assert (decode.bs, prefill.bs, captured) == ([1, 512], [4, 8192], 8192)


def test_a_setting_that_captured_graphs_cannot_follow_is_rejected(monkeypatch):
    from contextlib import nullcontext
    from types import SimpleNamespace

    import_sglang()
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
    from torch import nn

    from sgl_shift.forward import ShiftParallel
    from sgl_shift.layout import Layout
    from sgl_shift_patches import control, state

    shift = ShiftParallel(ShiftConfig(2, Settings(256)), Layout(2, 2), 1, None, nullcontext, base_model=[nn.Identity()])
    monkeypatch.setattr(state, "_shift", shift)
    monkeypatch.setattr(resolution, "captured_tokens", lambda _server_args: 256)
    controller = SimpleNamespace(scheduler=SimpleNamespace(server_args=None))
    handlers = control.update_handlers({}, controller)
    for key, value in ((control.THRESHOLD, 255), (control.MODE, 1)):  # 1: sp
        with pytest.raises(UpdateRejected, match="CUDA graphs hold stock TP for batches of up to 256 tokens"):
            handlers[key].validate(key, value)
    for key, value in ((control.THRESHOLD, 256), (control.THRESHOLD, 4000), (control.MODE, 2)):
        handlers[key].validate(key, value)
        handlers[key].apply(key, value)
    assert shift.settings == Settings(4000, "tp")


def test_a_replayed_batch_is_counted_and_marked_in_a_trace(monkeypatch):
    """A graph replays without any of our code: what is seen of it is that nothing was decided."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch

    from sgl_shift.forward import ShiftParallel
    from sgl_shift.layout import Layout
    from sgl_shift_patches import model_runner, state

    shift = ShiftParallel(ShiftConfig(2, Settings(256)), Layout(2, 2), 0, None, nullcontext)
    monkeypatch.setattr(state, "_shift", shift)
    batch = SimpleNamespace(input_ids=torch.zeros(5), forward_mode=SimpleNamespace(is_idle=lambda: False))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert model_runner.forward(lambda *_: "replayed", SimpleNamespace(is_draft_worker=False), batch) == "replayed"
    assert shift.stats.to_dict()["tokens"] == {"base": 0, "shift": 5}
    assert [e.name for e in profile.events() if e.name.startswith("shift_parallel")] == ["shift_parallel[shift]"]
