"""LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744): images become squares of one size, by a cut from their middle or by
being squeezed. With Pixtral's encoder, which config.json may name, they keep their shape as in Mistral Small 3.1."""

from __future__ import annotations

from typing import Any

from . import CLIP_MEAN, CLIP_STD, HALF, ImageRules, colours, mistral3, number

CLIP = "clip_vision_model"


class Rules(ImageRules, frozen=True, kw_only=True):
    edge: int  # pixels of a square
    shortest: int  # pixels of the shorter edge before the middle is cut out; 0: images are squeezed
    count: int  # features

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        return self.edge, self.edge

    def shown(self, image: Any, height: int, width: int) -> Any:
        if not self.shortest:
            return image.resize((width, height), self.resample)
        short = min(image.size)
        image = image.resize([self.shortest * length // short for length in image.size], self.resample)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def largest(self, tokens: int) -> tuple[int, int]:
        return self.edge, self.edge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return 1, self.count


def read(config: dict[str, Any], processor: dict[str, Any]) -> ImageRules:
    vision = config["vision_config"]
    if vision.get("model_type") == "pixtral":
        return mistral3.read({"spatial_merge_size": 1} | config, processor)
    rules = square(config, processor)
    first = config.get("vision_feature_select_strategy", "default") == "default"  # is left out
    count = (rules["edge"] // rules["patch"]) ** 2 + (vision.get("model_type", CLIP) == CLIP) - first
    return Rules(**rules, count=count)


def square(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """The fields of Rules but `count`. Raises ValueError."""
    vision = config["vision_config"]
    edge, clip = number(vision, "image_size", 336), vision.get("model_type", CLIP) == CLIP
    token = number(config, "image_token_index", number(config, "image_token_id", 32000, 1 << 24), 1 << 24)
    if processor.get("do_pad"):
        raise ValueError("do_pad is true, which is not supported")
    return {
        "placeholder": token,
        "token": token,
        "mean": colours(processor, "image_mean", CLIP_MEAN if clip else HALF),
        "std": colours(processor, "image_std", CLIP_STD if clip else HALF),
        "resample": number(processor, "resample", 3, 5),
        "patch": number(vision, "patch_size", 14, edge),
        "edge": edge,
        "shortest": _shortest(processor, edge, clip),
    }


def _shortest(processor: dict[str, Any], edge: int, clip: bool) -> int:
    """Pixels of the shorter edge before the middle is cut out; 0: images are squeezed. clip: whether they are cut where
    the processor has no key for it. Raises ValueError."""
    size = processor.get("size") or {}
    squeezed = isinstance(size, dict) and "height" in size
    square = size if squeezed else processor.get("crop_size") or {}
    if not isinstance(size, dict) or not isinstance(square, dict) or number(square, "height", edge) != edge:
        raise ValueError(
            f"size is {size!r} with the crop_size {square!r}, expected the image_size {edge} of vision_config"
        )
    if squeezed or not (clip or "shortest_edge" in size):
        return 0
    if (shortest := number(size, "shortest_edge", edge)) < edge:
        raise ValueError(f"size is {size!r}, less than the image_size {edge} of vision_config")
    return shortest
