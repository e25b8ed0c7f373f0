"""SmolVLM (Marafioti et al. 2025, arXiv 2504.05299): Idefics 3 with small models."""

from __future__ import annotations

from . import idefics3

CONFIG = {"text_type": "llama"}

Args, Model = idefics3.Args, idefics3.Model
