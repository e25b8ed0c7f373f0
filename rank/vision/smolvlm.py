"""SmolVLM (Marafioti et al. 2025, arXiv 2504.05299), as Idefics 3."""

from __future__ import annotations

from .idefics3 import read as read
