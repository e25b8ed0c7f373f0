"""InternLM2 and 2.5: in files as Llama, with queries, keys and values apart."""

from __future__ import annotations

from .llama import PAIRED, TENSORS, config

__all__ = ["PAIRED", "TENSORS", "config"]
