"""Shift Parallelism for SGLang: sequence parallelism for large batches, tensor parallelism for small ones, one KV cache."""

__version__ = "0.1.0"
