"""gpt-oss's experts as GGUF files have them: gate and up apart, outputs before inputs, or MXFP4's blocks.

Its checkpoints hold each of two projections as one tensor of all experts: in 16 bits with inputs before outputs, or in
MXFP4 (rank/model/stored_formats/mxfp4.py), gate and up interleaved. No weight in MXFP4 is rounded again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.config import Config
from ..model.stored_formats import method_of

MXFP4 = "MXFP4"
GROUP = 32
NAME = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj\.(weight|bias|blocks|scales)")
APART = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


class Part(NamedTuple):
    """One tensor of a file: its name in the model's code, the checkpoint's tensors, and what it is made of them."""

    name: str
    fields: tuple[str, ...]
    shape: tuple[int, ...]  # in elements
    make: Callable[[Sequence[Tensor]], Tensor]  # elements, or of MXFP4 blocks uint8 [experts, outputs, bytes]
    packed: bool = False


def takes(config: Config) -> bool:
    """Whether a quantised checkpoint can be written: of experts in MXFP4 alone."""
    return config.model_type == "gpt_oss" and method_of(config.quantization) == "mxfp4"


def parts(name: str, shape: Sequence[int]) -> list[Part] | None:
    """The GGUF tensor of a checkpoint's tensor, by its name in the model's code; None: it is of no such experts. Scales
    are part of what becomes of blocks."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    under, projection, field = found.groups()
    whole = f"{under}.{projection}_proj"
    made = []
    for at, part in enumerate(APART[projection]):
        rows = slice(at, None, len(APART[projection]))
        experts, outputs = shape[0], shape[2 if field == "weight" else 1] // len(APART[projection])
        if field == "weight":
            one = Part(f"{under}.{part}.weight", (whole + ".weight",), (experts, outputs, shape[1]), _turned(rows))
        elif field == "bias":
            one = Part(f"{under}.{part}.bias", (whole + ".bias",), (experts, outputs), _biases(rows))
        elif field == "blocks":
            fields = whole + ".blocks", whole + ".scales"
            one = Part(f"{under}.{part}.weight", fields, (experts, outputs, shape[2] * GROUP), _blocks(rows), True)
        else:
            continue
        made.append(one)
    return made


def _turned(rows: slice) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda given: given[0][..., rows].mT


def _biases(rows: slice) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda given: given[0][:, rows]


def _blocks(rows: slice) -> Callable[[Sequence[Tensor]], Tensor]:
    """A block has its scale, and behind it 16 bytes: in each an input of the first half in the lower bits, and one of
    the second."""

    def make(given: Sequence[Tensor]) -> Tensor:
        blocks, scales = given[0][:, rows], given[1][:, rows].view(torch.uint8)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [experts, outputs, groups, 32]
        first, second = codes.chunk(2, -1)
        return torch.cat((scales[..., None], first | second << 4), -1).flatten(-2)

    return make
