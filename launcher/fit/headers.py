"""The headers of safetensors files: names, types and shapes of tensors, without a byte of weights.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian, the header as
JSON, then the tensors, whose `data_offsets` count from the header's end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...rank.exits import MODEL, Stop
from .shape import Shape

INDEX = "model.safetensors.index.json"
LONGEST = 100_000_000  # bytes of a header; what is longer is no safetensors file
CLASSES = (  # a word in a tensor's name → its class; the first that fits
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".experts.", "experts"),
    ("norm", "norms"),
    ("attn", "attention"),
)


def files(path: Path) -> list[Path]:
    """The directory's weight files; empty where there are none. Raises Stop if the index names one that is missing."""
    if (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in index.values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise Stop(f"{path / INDEX} is garbled: {type(error).__name__}: {error}", MODEL) from None
        missing = [name for name in names if not (path / name).exists()]
        if missing and len(missing) < len(names):
            raise Stop(f"{path}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}", MODEL)
        return [] if missing else [path / name for name in names]
    return sorted(path.glob("*.safetensors"))


def read(file: Path) -> dict[str, dict[str, Any]]:
    """A file's tensors. Raises Stop where the file is no safetensors file or shorter than its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(LONGEST, size - 8):
                raise Stop(f"{file} is damaged or truncated: its header cannot be {length} bytes long", MODEL)
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((one["data_offsets"][1] for one in header.values()), default=0)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise Stop(f"{file} is damaged or truncated: {error}", MODEL) from None
    if end > size:
        raise Stop(f"{file} is truncated: {size} bytes where its header needs {end}", MODEL)
    return header


def by_class(path: Path) -> dict[str, int]:
    """Bytes of the checkpoint's tensors by class; empty where there are no weight files."""
    found: dict[str, int] = {}
    for file in files(path):
        for name, tensor in read(file).items():
            kind = next((kind for word, kind in CLASSES if word in name), "MLP")
            start, end = tensor["data_offsets"]
            found[kind] = found.get(kind, 0) + end - start
    return found


def compare(shape: Shape, classes: dict[str, int], width: float) -> str:
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


def weights(shape: Shape, width: float) -> float:
    """Bytes of the whole model with elements of `width` bytes, quantised matrices as they are."""
    narrow = shape.narrow or width
    packed = sum(part.held(1, 1) for layer in shape.layers for part in layer if part.packs)
    return packed * narrow + (shape.parameters - packed) * width
