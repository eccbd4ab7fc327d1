"""The only part of sgl-shift that knows SGLang: one file per SGLang surface, and the registry that lists them."""
