"""Triton's interpreter for the kernels of this project, in a process where Triton has long been imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sgl_shift_kernels import triton_kernels


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """What TRITON_INTERPRET would have done, had it been set before the first import of Triton.

    The kernels call nothing of Triton's own that is compiled, or those functions had to be converted as well.
    """
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(triton_kernels).items()):
            if isinstance(function, JITFunction):
                patch.setattr(triton_kernels, name, InterpretedFunction(function.fn))
        yield
