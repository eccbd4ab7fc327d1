"""SGLang on any x86-64 CPU, as an out-of-tree platform: for development, tests and the demo without GPUs.

Active only where ``SGLANG_PLATFORM=sgl_shift_cpu`` names it (our launcher does, on a machine without accelerators), so
that installing the package changes nothing. Attention is SGLang's ``torch_native``, ranks talk over gloo.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from glob import glob
from typing import Any

logger = logging.getLogger(__name__)

NAME = "sgl_shift_cpu"
MAX_TOTAL_TOKENS = 32768

# Device nodes: NVIDIA, AMD, Intel GPUs share /dev/dri with plain displays, hence by their compute nodes; Habana,
# Intel NPU and TPU; Ascend.
_ACCELERATOR_NODES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel/accel*", "/dev/accel[0-9]*", "/dev/davinci[0-9]*")


def accelerators() -> list[str]:
    """Accelerator devices of this machine, by what the kernel and torch show."""
    import torch

    found = sorted(node for pattern in _ACCELERATOR_NODES for node in glob(pattern))
    if not found and torch.cuda.is_available():
        found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not found and torch.xpu.is_available():
        found = [torch.xpu.get_device_name(i) for i in range(torch.xpu.device_count())]
    return found


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform's class, or None where nobody asked for it.

    Raises:
        RuntimeError: it was asked for on a machine with accelerators, which it would leave idle.
    """
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    if found := accelerators():
        raise RuntimeError(
            f"SGLANG_PLATFORM={NAME} is for machines without accelerators, this one has {', '.join(found)}; "
            "unset SGLANG_PLATFORM to serve on them"
        )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The first step of the pipeline: everything later sees a device, a backend and a dtype.
    register_resolution_hook("handle_deprecated_dp_attention")(fill_in_defaults)
    HookRegistry.register(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        keep_model_config,
        HookType.REPLACE,
    )
    return "sgl_shift_patches.cpu_device:CpuPlatform"


def keep_model_config(model_config: Any, _load_config: Any, _tp_size: int) -> Any:
    """Instead of padding heads and widths to what AMX kernels need (``configs/update_config.py``): KV heads fewer than
    ranks are replicated, as on GPUs."""
    return model_config


def fill_in_defaults(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Choose what a user of this platform would otherwise have to know, where the user said nothing, and log it."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    asked = resolving_view(server_args)
    chosen: dict[str, Any] = {}
    if asked.device is None:
        chosen["device"] = "cpu"
    if asked.attention_backend is None:
        chosen["attention_backend"] = "torch_native"
    if asked.dtype == "auto":
        chosen["dtype"] = "float32"  # exact, and faster here than half precision, which CPUs emulate
    if asked.max_total_tokens is None:
        chosen["max_total_tokens"] = MAX_TOTAL_TOKENS  # a rank cannot tell how much of the memory is its own
    environment = thread_environment(asked.dp_size * asked.tp_size * asked.pp_size)
    # Ranks share one memory, and see it fill up while others load: that is no imbalance between devices.
    environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if not asked.enable_torch_compile:
        environment["TORCH_COMPILE_DISABLE"] = "1"  # a few small helpers; compiling them takes half a minute a rank
    environment = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(environment)
    if chosen:
        declare_resolution(server_args, NAME, **chosen)
    logger.info(
        "CPU platform: chose %s",
        ", ".join(f"{name}={value}" for name, value in {**chosen, **environment}.items()) or "nothing, all was given",
    )
    previous(server_args)


def thread_environment(ranks: int) -> dict[str, str]:
    """Threads for ``ranks`` processes on the cores that this process may use.

    Each rank gets cores of its own where there are enough, and shares one otherwise. Waiting threads sleep: a spinning
    one would take the core from the rank that it waits for.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    bound = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in bound),
        "OMP_NUM_THREADS": str(each),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
