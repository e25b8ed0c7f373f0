"""The kernels of latent attention compile for every supported generation, in DeepSeek's sizes and in GLM-5.3's."""

import pytest
import torch
from phalanx.kernels.attention.backend import AttentionParams
from phalanx.kernels.attention.mla import Context, LatentNorm
from phalanx.kernels.rope.fp8_cache import E4M3
from phalanx.kernels.rope.rope import CosSin

from ..test_compile import Recorder, compile_launch

KERNELS = (
    "store_kernel", "absorb_kernel", "absorb_rotated_kernel", "decode_kernel", "combine_kernel", "values_kernel",
    "prefill_kernel", "expanded_kernel",
)  # fmt: skip
CASES = [
    (torch.bfloat16, 16, 90, True), (torch.bfloat16, 16, 90, False), (torch.float16, 128, 80, False),
    (torch.bfloat16, 5, 100, False), (torch.float32, 16, 90, False), (torch.float16, 128, 80, True),
    (torch.bfloat16, 16, 80, True), (torch.bfloat16, 5, 100, True), (torch.float32, 16, 90, True),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, heads, arch, fp8, rope", [*((*case, 64) for case in CASES), (torch.bfloat16, 16, 90, False, 0)]
)
def test_compiles(dtype, heads, arch, fp8, rope, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.attention import mla_store_triton, mla_triton

    home = {name: mla_store_triton if name in KERNELS[:3] else mla_triton for name in KERNELS}
    kernels = {name: getattr(module, name) for name, module in home.items()}
    launches = {name: Recorder() for name in KERNELS}
    for name, recorder in launches.items():
        monkeypatch.setattr(home[name], name, recorder)
    monkeypatch.setattr(mla_triton, "_large_tiles", lambda x: x.element_size() == 2 and arch >= 90)
    for module in (mla_triton, mla_store_triton):
        monkeypatch.setattr(module, "overlaps", lambda x: x.element_size() == 2 and arch >= 90)
    width = 512 + rope
    shapes = (6, heads, 128 + rope), (6, width), (3, 16, width)
    q, latents, cache = (torch.zeros(*shape, dtype=dtype) for shape in shapes)
    scales = torch.zeros(3, 1, 2, 16, dtype=torch.uint8) if fp8 else None
    cache = cache.to(E4M3) if fp8 else cache
    numbers, tables = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
    turn, norm = CosSin(*torch.zeros(2, 6, 1, rope), True), LatentNorm(latents[0, :512], 1e-6)
    mla_store_triton.rope_and_store_latents(q, latents, norm, turn, cache, torch.zeros(6, dtype=torch.int64), scales)
    up, slots = torch.zeros(heads, 256, 512, dtype=dtype), torch.zeros(6, dtype=torch.int64)
    queries = torch.zeros(6, heads, width, dtype=dtype)
    mla_store_triton.absorb_and_store_latents(q, latents, norm, turn, cache, slots, up, queries, scales)
    mla_store_triton.absorb_rotated(q, up, queries)
    absorbed, mixed = (torch.zeros(6, heads, width, dtype=dtype) for width in (512 + rope, 512))
    for query_len in (1, 3):
        mla_triton.decode(absorbed, cache, 512, tables, numbers, mixed, 0.1, 4, scales, query_len)
    mla_triton.values(mixed, up, 128)
    mla_triton.prefill(absorbed, cache, 512, tables, numbers, numbers, mixed, 0.1, 0, 2, 3, scales)
    context = Context(0, [3, 3], [30, 10], torch.zeros(40, dtype=torch.int64), numbers, numbers)
    kv, rotated = torch.zeros(40, heads, 256, dtype=dtype), torch.zeros(40, 512 + rope, dtype=dtype)[:, 512:]
    out = torch.zeros(6, heads, 128, dtype=dtype)
    mla_triton.prefill_expanded(q, kv, rotated, context, AttentionParams(0.1), out)
    for name, recorder in launches.items():
        assert recorder.found, name
        for args, options in recorder.found:
            compiled = compile_launch(kernels[name], args, options, arch)
            assert compiled.metadata.shared <= (227 if arch >= 90 else 99) << 10, name
