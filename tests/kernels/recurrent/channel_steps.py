"""Steps of Kimi delta attention, where each channel of a key has a decay; run as a program, Triton's kernels in the
interpreter."""

from __future__ import annotations

import torch

from ..attention.decoding import mend_interpreter
from .steps import BESIDE_DRAFTS, PROMPTS, SIZES, Layer, check_chunks, check_steps, make_rows

if __name__ == "__main__":
    mend_interpreter()
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    for sizes, query_len, entries in ((SIZES[0], 1, 1), (SIZES[1], 4, 4)):
        check_steps(sizes, 4, torch.float32, 1e-5, query_len=query_len, entries=entries, channels=True)
    check_steps(SIZES[0], 4, torch.bfloat16, 2e-2, channels=True, floor=-5.0)
    check_chunks(Layer(SIZES[0], make_rows(*PROMPTS), 4, channels=True), 2e-5)
    check_chunks(Layer(SIZES[2], make_rows(*BESIDE_DRAFTS, query_len=4), 4, channels=True, floor=-5.0), 2e-5)
    check_chunks(Layer(SIZES[2], make_rows([70], [90]), dtype=torch.float16, channels=True), 4e-3)
    fast = Layer(SIZES[2], make_rows([128], [128]), channels=True)
    a = torch.where(torch.rand(fast.gates.a.shape) < 0.05, 2000.0, -8.0)
    fast.gates = fast.gates._replace(a=a)
    fast.x[:] = fast.x[0]
    check_chunks(fast, 2e-5)
