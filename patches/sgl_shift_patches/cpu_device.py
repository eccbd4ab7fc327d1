"""The platform class of :mod:`sgl_shift_patches.cpu_platform`."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_torch_profiler_activity_str(self) -> str:
        """A name that no ``/start_profile`` has among its activities. SGLang knows "CPU" without a platform; named here
        as well, ``utils/profile_utils.py:_ProfilerBase.create`` would start two profilers in one process."""
        return "sgl_shift_cpu"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Called as each worker imports its model runner; the hook of ``cpu_platform.activate`` must be in place."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
