"""Writes docs/kernel-table.md, the candidates of the families that declare them: python -m phalanx.kernels.document"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .attention.attention import CANDIDATES
from .candidate import Candidate
from .gemm import linear
from .moe import moe
from .moe.moe import ExpertCandidate
from .quantized import packed_gemm
from .quantized.packed_gemm import PackedCandidate

PAGE = Path(__file__).parents[1] / "docs" / "kernel-table.md"
FAMILIES: dict[str, Sequence[Candidate | ExpertCandidate | PackedCandidate]] = {
    "Attention on GPUs": CANDIDATES["cuda"],
    "Attention on CPUs": CANDIDATES["cpu"],
    "Linears of plain weights on GPUs": linear.GPU,
    "Linears of plain weights on CPUs": linear.CPU,
    "Linears of packed weights on GPUs": packed_gemm.CANDIDATES,
    "Experts on GPUs, by routed tokens (a token and one of its experts)": moe.CANDIDATES,
}
HEAD = """\
# Which kernel is chosen

Of each family the first candidate that takes what is there computes it. `python -m phalanx.kernels.document` writes
this page from the declarations in `kernels/`; [kernels.md](kernels.md) says how the kernels work.
"""


def page() -> str:
    parts = [HEAD]
    for family, candidates in FAMILIES.items():
        rows = [f"| `{one.name}` | {one.devices} | {one.takes} |" for one in candidates]
        parts.append(
            "\n".join(
                [
                    f"## {family}\n",
                    "| candidate | devices | takes |",
                    "|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
