"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): Mistral's layers with fused qkv and gate_up."""

from __future__ import annotations

from . import mistral

Args, Model = mistral.Args, mistral.Model
