"""BLIP (Li et al. 2022, arXiv 2201.12086): an image becomes a square, whose features the text attends to. Of models
that answer questions the tower reads the question, too, and the answer attends to the question's features."""

from __future__ import annotations

from typing import Any

from . import CLIP_MEAN, CLIP_STD, ImageRules, colours, number

CAPTIONS, ANSWERS = "BlipForConditionalGeneration", "BlipForQuestionAnswering"
SEP = 102  # ends texts of BERT's tokenizer
CLS = 101  # begins texts of BERT's tokenizer, and stands where the image and the decoder's own beginning go


class Rules(ImageRules, frozen=True, kw_only=True):
    edge: int  # pixels of the square
    begin: int  # the token that the decoder begins with

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        return self.edge, self.edge

    def largest(self, tokens: int) -> tuple[int, int]:
        return self.edge, self.edge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        # One is of the whole image. A question has as many as tokens.
        return self.longest or 1 + (self.edge // self.patch) ** 2, 1

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [*[self.token] * (rows * columns), self.begin]


def kind(config: dict[str, Any]) -> Any:
    """The class that the checkpoint is of. config: config.json."""
    kinds = config.get("architectures") or [CAPTIONS]
    return kinds[0] if isinstance(kinds, list) else kinds


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    vision, text = config["vision_config"], config.get("text_config") or config
    size = processor.get("size") or {}
    edge = number(vision, "image_size", 384, 1 << 12)
    if not {number(size, "height", edge), number(size, "width", edge)} == {edge}:
        raise ValueError(f"size is {size!r}, expected the image_size {edge} of vision_config")
    patch = number(vision, "patch_size", 16)
    if edge % patch:
        raise ValueError(f"image_size {edge} of vision_config is no multiple of its patch_size {patch}")
    begins, ends = (number(text, key, one, 1 << 24) for key, one in (("cls_token_id", CLS), ("sep_token_id", SEP)))
    asked = kind(config) == ANSWERS
    return Rules(
        placeholder=begins,
        single=True,
        needed=True,
        frame=(begins, ends) if asked else (),
        longest=number(text, "max_position_embeddings", 512) if asked else 0,
        token=number(text, "vocab_size", 30524, 1 << 24) - 1,  # [ENC], which no caption has
        begin=number(text, "bos_token_id", 30522, 1 << 24),
        mean=colours(processor, "image_mean", CLIP_MEAN),
        std=colours(processor, "image_std", CLIP_STD),
        patch=patch,
        edge=edge,
    )
