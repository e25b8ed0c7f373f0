"""Qwen3.5 with experts (Qwen team 2026)."""

from __future__ import annotations

from .qwen3_5 import read as read
