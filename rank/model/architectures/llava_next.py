"""LLaVA-NeXT (Liu et al. 2024, LLaVA 1.6): Llama, Mistral or Qwen2 that see an image whole and in parts."""

from __future__ import annotations

from ..vision import llava_next
from . import llava

CONFIG = {"text_type": "llama"}

Args = llava.Args


class Model(llava.Model):
    PREFIXES = llava.Model.PREFIXES | {f"{under}image_newline": "vision.row_end.weight" for under in ("", "model.")}
    TOWER = llava_next.Tower
