"""Shift Parallelism for SGLang: sequence parallel for large batches, tensor parallel for small ones, one KV cache."""

__version__ = "0.1.0"
