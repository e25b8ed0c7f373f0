"""BLIP (Li et al. 2022, arXiv 2201.12086): an image becomes a square, whose features the text attends to."""

from __future__ import annotations

from typing import Any

from . import CLIP_MEAN, CLIP_STD, ImageRules, colours, whole

CLS = 101  # begins texts of BERT's tokenizer, and stands where the image and the decoder's own beginning go


class Rules(ImageRules, frozen=True, kw_only=True):
    edge: int  # pixels of the square
    begin: int  # the token that the decoder begins with

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        return self.edge, self.edge

    def largest(self, tokens: int) -> tuple[int, int]:
        return self.edge, self.edge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return 1 + (self.edge // self.patch) ** 2, 1  # one is of the whole image

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [*[self.token] * (rows * columns), self.begin]


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    vision, text = config["vision_config"], config.get("text_config") or config
    size = processor.get("size") or {}
    edge = whole(vision, "image_size", 384, 1 << 12)
    if not {whole(size, "height", edge), whole(size, "width", edge)} == {edge}:
        raise ValueError(f"size is {size!r}, expected the image_size {edge} of vision_config")
    patch = whole(vision, "patch_size", 16)
    if edge % patch:
        raise ValueError(f"image_size {edge} of vision_config is no multiple of its patch_size {patch}")
    return Rules(
        placeholder=whole(text, "cls_token_id", CLS, 1 << 24),
        token=whole(text, "vocab_size", 30524, 1 << 24) - 1,  # [ENC], which no caption has
        begin=whole(text, "bos_token_id", 30522, 1 << 24),
        mean=colours(processor, "image_mean", CLIP_MEAN),
        std=colours(processor, "image_std", CLIP_STD),
        patch=patch,
        edge=edge,
    )
