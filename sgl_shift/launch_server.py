"""``python -m sgl_shift.launch_server``: SGLang's server with Shift Parallelism; the demo model if none is named.

Takes all of SGLang's arguments. On a machine without accelerators it serves on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from sgl_shift.config import ConfigError
from sgl_shift.layout import LayoutError
from sgl_shift.support import RefusedError

logger = logging.getLogger("sgl_shift")


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    asked = _asked(argv)
    on_cpu = select_platform(asked.device)
    if asked.model_path is None and asked.config is None and not asked.help:
        if not on_cpu:
            return complain("without --model-path a small demo model is served, on the CPU only; name a model")
        argv = argv + demo_arguments(asked)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sgl_shift_patches import registry

    load_plugins()
    try:
        registry.verify(registry.DOORS)  # or the flags below would not even be known
        run_server(prepare_server_args(argv))
    except (ConfigError, LayoutError, RefusedError, registry.HookError) as error:
        return complain(str(error))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def select_platform(device: str | None) -> bool:
    """Name our CPU platform where nothing else was named and there is no accelerator; whether the CPU is used."""
    from sgl_shift_patches import cpu_platform

    if (
        "SGLANG_PLATFORM" not in os.environ
        and device in (None, "cpu")
        and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1"
    ):
        if not cpu_platform.accelerators():
            os.environ["SGLANG_PLATFORM"] = cpu_platform.NAME
            logger.info("no accelerator found: serving on the CPU (SGLANG_PLATFORM=%s)", cpu_platform.NAME)
    return os.environ.get("SGLANG_PLATFORM") == cpu_platform.NAME


def demo_arguments(asked: argparse.Namespace) -> list[str]:
    from sgl_shift import demo

    arguments = ["--model-path", str(demo.model_folder()), "--served-model-name", demo.NAME]
    if asked.tp_size is None:
        arguments += ["--tp-size", str(demo.WORLD_SIZE)]
    if asked.sp_size is None and "SGL_SHIFT_SP_SIZE" not in os.environ:
        arguments += ["--sp-size", str(asked.tp_size or demo.WORLD_SIZE)]
    return arguments


def _asked(argv: list[str]) -> argparse.Namespace:
    """The few arguments that decide what to add before SGLang parses all of them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--config")
    parser.add_argument("--device")
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", dest="tp_size")
    parser.add_argument("--sp-size", "--sequence-parallel-size", dest="sp_size")
    return parser.parse_known_args(argv)[0]


def complain(message: str) -> int:
    print(f"sgl-shift: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
