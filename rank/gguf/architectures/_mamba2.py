"""Entries that models with Mamba-2 layers share in GGUF files."""

from __future__ import annotations

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from ._common import layer

LOGARITHMS = ("ssm_a",)
ONES = {"ssm_conv1d": (1,)}
FLAT = "ssm_a", "ssm_d", "ssm_norm"


def tensors(module: str) -> dict[str, str]:
    """Names of a Mamba-2 layer's tensors. module: the checkpoint's name of the layer."""
    names = {
        "ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_in": "in_proj", "ssm_conv1d": "conv1d",
        "ssm_norm": "norm", "ssm_out": "out_proj",
    }  # fmt: skip
    return layer(**{theirs: f"{module}.{ours}" for theirs, ours in names.items()})


def layers(m: Metadata, count: int) -> list[int]:
    """The layers with Mamba-2, which the tensors tell."""
    found = [i for i in range(count) if m.tensor(f"blk.{i}.ssm_a") is not None]
    if not found:
        raise FatalError(f"{m.file} has no layer with Mamba-2: tensors ssm_a are missing", MODEL)
    return found


def heads(m: Metadata) -> tuple[int, int]:
    """The number of heads and their size."""
    count, inner = m.integer("ssm.time_step_rank"), m.integer("ssm.inner_size")
    if count < 1 or inner < 1 or inner % count:
        raise FatalError(f"{m.file}: {count} heads of Mamba-2 cannot share an ssm.inner_size of {inner}", MODEL)
    return count, inner // count


def has_bias(m: Metadata, index: int, part: str) -> bool:
    return m.tensor(f"blk.{index}.{part}.bias") is not None
