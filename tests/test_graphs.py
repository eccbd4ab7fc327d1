"""What CUDA graphs hold. Capturing itself needs a GPU; what is asked for, and what a replay is counted as, does not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sgl_shift.config import Settings, ShiftConfig
from sgl_shift.forward import Batch, ShiftParallel
from sgl_shift.layout import Layout
from sgl_shift.policy import Configuration
from sgl_shift_patches import resolution
from tests.hosting import import_sglang

SHIFT, BASE = Configuration.SHIFT, Configuration.BASE
SENT = 1000  # bytes, of a base forward


def planned(
    settings: Settings, decode: list[int], prefill: list[int], **arguments: Any
) -> tuple[ShiftConfig, Any, Any]:
    """(configuration, decode graphs, prefill graphs) that are asked for, and what the doctor says of them."""
    import_sglang()
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path="none", **arguments)
    graphs = CudaGraphConfig(
        decode=PhaseConfig(backend="full", bs=decode, max_bs=decode[-1]),
        prefill=PhaseConfig(backend="breakable", bs=prefill, max_bs=prefill[-1]),
    )
    declare_resolution(server_args, "test", cuda_graph_config=graphs)
    shift = resolution.plan_graphs(server_args, ShiftConfig(2, settings))
    return shift, resolving_view(server_args).cuda_graph_config, resolution.captured_graphs(server_args, shift)


def test_every_graph_holds_the_configuration_of_its_tokens():
    shift, graphs, said = planned(Settings(threshold=256), [1, 248, 256, 512], [4, 256, 288, 8192])
    assert shift.settings.threshold == 256
    assert (graphs.decode.bs, graphs.prefill.bs) == ([1, 248, 256, 512], [4, 256, 288, 8192])
    assert said == [
        "decode, 1 to 256 tokens: shift",
        "decode, 512 to 512 tokens: base",
        "prefill, 4 to 256 tokens: shift",
        "prefill, 288 to 8192 tokens: base",
    ]


@pytest.mark.parametrize(
    ("threshold", "width", "expected"),
    [(250, 1, 256), (248, 1, 248), (600, 1, 600), (1, 1, 1), (250, 4, 992), (1000, 4, 1024)],
)
def test_the_threshold_is_a_size_of_the_decode_graphs(threshold, width, expected):
    """249 requests are padded to 256. With speculation a request is several tokens."""
    arguments = {"speculative_num_draft_tokens": width} if width > 1 else {}
    shift, _, _ = planned(Settings(threshold), [1, 248, 256, 512], [4], **arguments)
    assert shift.settings.threshold == expected


def test_a_mode_is_not_snapped():
    assert planned(Settings(250, "sp"), [1, 256], [4])[0].settings == Settings(250, "sp")


def test_adapters_keep_graphs_in_tp():
    _, _, said = planned(Settings(4), [1, 256], [8], enable_lora=True, lora_paths=[])
    assert said == ["decode, 1 to 256 tokens: shift", "prefill, 8 to 8 tokens: shift"]


@pytest.mark.parametrize(
    ("settings", "kept"), [(Settings(256), [4, 256]), (Settings(2), None), (Settings(2, "sp"), None)], ids=str
)
def test_prefill_in_the_base_configuration_may_be_kept_out_of_graphs(settings, kept, monkeypatch):
    monkeypatch.setenv(resolution.EAGER_VARIABLE, "1")
    _, graphs, _ = planned(settings, [1, 2, 512], [4, 256, 8192])
    assert graphs.decode.bs == [1, 2, 512]
    if kept:
        assert (graphs.prefill.backend, graphs.prefill.bs, graphs.prefill.max_bs) == ("breakable", kept, kept[-1])
    else:
        assert graphs.prefill.backend == "disabled"


@pytest.mark.parametrize(("asked", "expected"), [(None, "flashinfer"), ("fa3", "fa3")])
def test_flashinfer_is_the_default_on_cuda(asked, expected, monkeypatch):
    import_sglang()
    import sglang.srt.utils
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    from sgl_shift_patches import cli

    monkeypatch.setattr(sglang.srt.utils, "is_cuda", lambda: True)
    server_args = ServerArgs(model_path="none", attention_backend=asked)
    cli._attach(server_args, ShiftConfig(2))
    seen = []
    resolution.default_attention_backend(
        server_args, lambda arguments: seen.append(resolving_view(arguments).attention_backend)
    )
    assert seen == [expected]


# --- what a graph replays ---


def shift_parallel(settings: Settings) -> ShiftParallel:
    return ShiftParallel(ShiftConfig(2, settings), Layout(2, 2), 1, None, nullcontext, base_model=[nn.Identity()])


def capture(shift: ShiftParallel, kind: str, sizes: list[int], monkeypatch: Any, able: bool = True) -> None:
    ran = []

    def run_base(_base: Any, batch: Batch) -> None:
        shift.stats.bytes_sent["all_to_all"] += SENT
        ran.append((BASE, batch.num_tokens))

    monkeypatch.setattr(shift, "_run_base", run_base)
    for size in sizes:
        arguments = {"input_ids": torch.zeros(size, dtype=torch.long)}
        batch = Batch(arguments, size, able, lambda: None, kind=kind, captured=True)
        shift.run(lambda input_ids: ran.append((SHIFT, len(input_ids))), None, batch)
    for configuration, size in ran:
        assert shift.captured[kind][size].configuration is configuration


def test_a_replay_is_counted_as_what_its_graph_holds(monkeypatch):
    """And marked in a trace. Python does not run: what is seen of a replay is that nothing was decided."""
    from types import SimpleNamespace

    from sgl_shift_patches import model_runner, state

    shift = shift_parallel(Settings(256))
    capture(shift, "decode", [511, 256, 1], monkeypatch)
    capture(shift, "prefill", [512, 288, 4], monkeypatch, able=False)  # as with adapters
    assert shift.stats.total == shift.stats.bytes_sent["all_to_all"] == 0
    monkeypatch.setattr(state, "_shift", shift)
    import_sglang()
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def replay(mode: ForwardMode, num_tokens: int) -> list[str]:
        batch = SimpleNamespace(input_ids=torch.zeros(num_tokens), forward_mode=mode)
        runner = SimpleNamespace(is_draft_worker=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert model_runner.forward(lambda *_: "replayed", runner, batch) == "replayed"
        return [event.name for event in profile.events() if event.name.startswith("shift_parallel")]

    for num_tokens in (1, 2, 256):
        assert replay(ForwardMode.DECODE, num_tokens) == ["shift_parallel[shift]"]
    assert replay(ForwardMode.EXTEND, 300) == ["shift_parallel[shift]"]
    assert shift.stats.padding_tokens == 0
    assert replay(ForwardMode.DECODE, 257) == ["shift_parallel[base]"]
    assert shift.stats.tokens == {BASE: 257, SHIFT: 1 + 2 + 256 + 300}
    assert shift.stats.padding_tokens == 511 - 257 + 1  # SGLang's to the graph, ours to a multiple of SP
    assert shift.stats.bytes_sent["all_to_all"] == SENT


def test_a_setting_that_captured_graphs_cannot_follow_is_rejected(monkeypatch):
    import_sglang()
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    from sgl_shift_patches import control, state

    shift = shift_parallel(Settings(256))
    capture(shift, "decode", [1, 256, 512], monkeypatch)
    capture(shift, "prefill", [288, 4], monkeypatch, able=False)
    monkeypatch.setattr(state, "_shift", shift)
    handlers = control.update_handlers({}, None)
    for key, value, held in (
        (control.THRESHOLD, 255, "decode graphs of 256 tokens"),
        (control.THRESHOLD, 512, "decode graphs of 512 tokens"),
        (control.MODE, 1, "decode graphs of 1 to 256 tokens"),  # sp
        (control.MODE, 2, "decode graphs of 512 tokens"),  # tp
    ):
        with pytest.raises(UpdateRejected, match=held):
            handlers[key].validate(key, value)
    for value in (256, 300, 511):  # the same for every graph; what runs eagerly follows
        handlers[control.THRESHOLD].validate(control.THRESHOLD, value)
        handlers[control.THRESHOLD].apply(control.THRESHOLD, value)
    assert shift.settings == Settings(511)
    for best, held in ((100, 256), (300, 300), (600, 511)):  # what is measured later
        assert shift.held("decode", best) == held
        assert shift.held("prefill", best) == best
