"""Qwen3-VL with experts (Qwen team 2025, arXiv 2511.21631), as Qwen3-VL."""

from __future__ import annotations

from .qwen3_vl import read as read
