"""Qwen2-VL (Qwen team 2024, arXiv 2409.12191), as Qwen2.5-VL."""

from __future__ import annotations

from .qwen2_5_vl import read as read
