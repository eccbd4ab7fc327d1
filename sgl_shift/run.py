"""``python -m sgl_shift.run MODULE ...``: a module that parses SGLang's arguments, with the plugin loaded first.

SGLang's own servers load plugins before they parse. Its benchmarks, and the router that starts replicas itself, do not:
they do not know ``--sp-size`` (``sglang/benchmark/*.py``, ``sglang_router/launch_server.py``).
"""

from __future__ import annotations

import runpy
import sys

from sgl_shift.config import ConfigError
from sgl_shift.launch_server import complain, select_platform
from sgl_shift.layout import LayoutError
from sgl_shift.support import RefusedError


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        return complain("name a module, as in: python -m sgl_shift.run sglang.benchmark.one_batch --sp-size 2 ...")
    select_platform(None)

    from sglang.srt.plugins import load_plugins

    from sgl_shift_patches import registry

    load_plugins()
    sys.argv = argv
    try:
        registry.verify(registry.DOORS)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except (ConfigError, LayoutError, RefusedError, registry.HookError) as error:
        return complain(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
