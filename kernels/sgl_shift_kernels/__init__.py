"""Tensor kernels of Shift Parallelism. Knows tensors: no groups, no SGLang."""

from sgl_shift_kernels.launchers import pack_output, pack_qkv, unpack_output, unpack_qkv

__all__ = ["pack_output", "pack_qkv", "unpack_output", "unpack_qkv"]
