"""The door that SGLang finds: entry point ``sglang.srt.plugins``, called in every SGLang process."""

from __future__ import annotations


def register() -> None:
    """Register the flags, the checks and the hook that brings Shift Parallelism up in a rank.

    Without ``--sp-size`` they hand everything through; SGLang is as it is without the package.
    """
    from sgl_shift_patches import engine, registry, resolution

    resolution.register()  # first: it is what refuses to start when anything below fails
    registry.register(registry.DOORS)
    engine.extend()
