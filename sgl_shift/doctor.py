"""``python -m sgl_shift.doctor``: is this environment, or a deployment in it, fit for Shift Parallelism?

    python -m sgl_shift.doctor                                                 the environment and SGLang's source
    python -m sgl_shift.doctor --model-path M --tp-size 8 --sp-size 4 ...      and what a server with these would be
    python -m sgl_shift.doctor --wheel sglang-0.5.24-py3-none-any.whl          what another SGLang changed

Takes all of SGLang's arguments, needs no GPU and starts nothing. Exit status 0 if healthy, else 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from sgl_shift.launch_server import select_platform


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(
        "python -m sgl_shift.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--wheel", type=Path, help="another SGLang: a wheel, or a folder that holds sglang/")
    parser.add_argument("--device", help=argparse.SUPPRESS)
    own, arguments = parser.parse_known_args(argv)

    if own.wheel is not None and not own.wheel.exists():
        parser.error(f"no such wheel or folder: {own.wheel}")

    select_platform(own.device)  # before anything imports SGLang
    from sgl_shift_patches import doctor

    if own.wheel is not None:
        return doctor.compare(own.wheel)
    return doctor.examine(arguments + (["--device", own.device] if own.device else []))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
