"""Writes docs/kernel-table.md, the candidates of the families that declare them: python -m phalanx.kernels.document"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .attention.attention import CANDIDATES
from .candidate import Candidate
from .gemm import linear
from .moe import moe, router
from .moe.moe import ExpertCandidate
from .quantized import linear as packed_linear
from .quantized import packed_gemm
from .quantized.packed_gemm import PackedCandidate

PAGE = Path(__file__).parents[1] / "docs" / "kernel-table.md"
FAMILIES: dict[str, Sequence[Candidate | ExpertCandidate | PackedCandidate]] = {
    "Attention on GPUs": CANDIDATES["cuda"],
    "Attention on CPUs": CANDIDATES["cpu"],
    "Linears of plain weights on GPUs": linear.GPU,
    "Linears of plain weights on CPUs": linear.CPU,
    "Linears of packed weights": packed_linear.CANDIDATES,
    "Linears of packed weights on GPUs": packed_gemm.CANDIDATES,
    "Experts on GPUs, by routed tokens (a token and one of its experts)": moe.CANDIDATES,
    "Routers of experts": router.CANDIDATES,
}
# Families without a choice: their kernels on GPUs, and on CPUs.
SINGLE = {
    "norms of rows": (("norm.cu", "layer_norm.cu"), ("norm.cpp",)),
    "norms in e4m3": (("e4m3_norm.cu",), ()),
    "activations": (("activation.cu", "xielu.cu"), ("activation.cpp", "xielu.cpp")),
    "embedding": (("embedding.cu",), ("embedding.cpp",)),
    "rotary embedding and the store of keys and values": (("rope.cu", "fp8_triton.py"), ("rope.cpp",)),
    "store of latents": (("mla_store_triton.py",), ()),
    "choice of tokens for sparse attention": (("indexer_triton.py", "topk_select.cu"), ()),
    "gated delta rule": (("gated_delta_triton.py", "gated_delta_chunks_triton.py"), ("gated_delta.cpp",)),
    "state space duality": (("ssd_triton.py",), ("ssd.cpp",)),
    "all-reduce": (("allreduce.cu", "allreduce_norm.cu"), ("shm_allreduce.cpp",)),
    "likeliest token": (("argmax.cu",), ("argmax.cpp",)),
}
HEAD = """\
# Which kernel is chosen

Of each family the first candidate that takes what is there computes it. `python -m phalanx.kernels.document` writes
this page from the declarations in `kernels/`; [kernels.md](kernels.md) says how the kernels work.
"""
SINGLE_HEAD = """\
## Families of one kernel

On CPUs torch computes what the kernel does not take: other dtypes than f32 and bf16, and prompts of recurrent layers.

| family | GPUs | CPUs |
|---|---|---|"""


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
    rows = [f"| {family} | {_names(on_gpus)} | {_names(on_cpus)} |" for family, (on_gpus, on_cpus) in SINGLE.items()]
    parts.append("\n".join([SINGLE_HEAD, *rows, ""]))
    return "\n".join(parts)


def _names(sources: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in sources) or "torch"


if __name__ == "__main__":
    PAGE.write_text(page())
