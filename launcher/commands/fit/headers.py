"""What a checkpoint's weight files hold by their headers, beside what the arithmetic says."""

from __future__ import annotations

from pathlib import Path

from ....rank.safetensors_header import INDEX, SINGLE, read_index, weight_files
from .shape import ModelShape

CLASSES = (  # a word in a tensor's name → its class; the first that fits
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".experts.", "experts"),
    ("norm", "norms"),
    ("attn", "attention"),
)


def by_class(path: Path) -> dict[str, int]:
    """Bytes of the tensors by class; empty where there are no weight files. Raises Stop where one is broken."""
    found: dict[str, int] = {}
    if not any((path / name).exists() for name in (INDEX, SINGLE)):
        return found
    if not any((path / name).exists() for name in weight_files(path).values()):
        return found  # the index came with config.json
    for tensors in read_index(path).headers.values():
        for name, entry in tensors.items():
            kind = next((kind for word, kind in CLASSES if word in name), "MLP")
            found[kind] = found.get(kind, 0) + entry.stop - entry.start
    return found


def compare(shape: ModelShape, classes: dict[str, int], width: float) -> str:
    """What to say of the checkpoint's bytes beside the arithmetic's; `width` is bytes of an unquantised element."""
    if not classes:
        return "from config.json alone: there are no weight files"
    held, wanted = sum(classes.values()), weights(shape, width)
    if abs(held - wanted) <= 0.01 * wanted:
        return f"the weight files hold {held / 1e9:.2f} GB, as the arithmetic says"
    return (
        f"the weight files hold {held / 1e9:.2f} GB, the arithmetic says {wanted / 1e9:.2f} GB: "
        "tensors that are not read, or a config.json that is not theirs"
    )


def weights(shape: ModelShape, width: float) -> float:
    """Bytes of the whole model with elements of `width` bytes, quantised matrices as they are."""
    narrow = shape.narrow or width
    packed = sum(part.held(1, 1) for layer in shape.layers for part in layer if part.packs)
    return packed * narrow + (shape.parameters - packed) * width
