"""The CUDA kernel for prompts, prefill.cu, thread by thread on a CPU."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import kv_boxes, prefill
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.attention.reference import paged_attention_reference

from .. import cuda_model
from .test_attention import make_caches, make_rows

BOUNDS = {torch.bfloat16: 2.5e-2, torch.float16: 3e-3}


def box(start, rows, columns, height, pitch, *runs):
    assert pitch == columns  # the model has no other pitch
    return cuda_model.Box(start, rows, columns, height, *runs)


@pytest.fixture
def in_the_model(monkeypatch, cuda_models):
    """prefill.prefill in the model, on few multiprocessors. New tensors hold NaN."""

    def kernel(source, name, dtype, shared=0, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared=0):
            assert shared <= prefill.SMEM_BYTES
            cuda_model.launch(library, grid, threads, args, torch.empty(0), any_order=True)

        return launch

    torch.manual_seed(0)
    prefill._made.cache_clear()
    kv_boxes._maps.cache_clear()
    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "tensor_map", box)
    monkeypatch.setattr(prefill, "device_caps", lambda _: SimpleNamespace(num_sms=3))
    cuda_model.poison_new_tensors(monkeypatch)
    return prefill.prefill


# Heads of whole runs of 64 elements and others, q in registers and in part in shared memory; prompts, chunks behind
# others' tokens, ends within a tile, boxes of several sizes.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "dim, heads, kv_heads, block_size, window, cap, sinks, dtype",
    [
        (64, 2, 1, 16, 0, 0.0, False, torch.bfloat16),
        (80, 2, 2, 16, 0, 0.0, True, torch.float16),
        (96, 2, 2, 64, 0, 1.5, False, torch.float16),
        (96, 4, 2, 8, 40, 0.0, False, torch.bfloat16),
        (112, 2, 1, 32, 0, 0.0, False, torch.bfloat16),
        (144, 1, 1, 16, 0, 0.0, False, torch.float16),
        (160, 2, 2, 16, 33, 1.5, False, torch.float16),
        (192, 2, 1, 64, 0, 0.0, True, torch.bfloat16),
        (240, 2, 2, 16, 0, 0.0, False, torch.float16),
        (256, 2, 2, 8, 100, 0.0, False, torch.bfloat16),
    ],
)
def test_prefill(dim, heads, kv_heads, block_size, window, cap, sinks, dtype, in_the_model):
    query_lens, kv_lens = [3, 150, 40], [3, 170, 300]
    blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, block_size, blocks)
    keys, values = make_caches(rows, block_size, blocks, kv_heads, dim, dtype)
    q = torch.randn(sum(query_lens), heads, dim).to(dtype)
    scores = AttentionParams(dim**-0.5, window, cap, torch.randn(heads) * 3 if sinks else None)
    want = paged_attention_reference(q, keys, values, rows, scores)
    out = torch.empty_like(q)
    items = torch.from_numpy(prefill.prefill_work(query_lens, kv_lens, 0, 3))
    in_the_model(q, keys, values, rows.block_tables, items, out, *scores)
    torch.testing.assert_close(out.flatten(1), want, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


def test_prompts_as_hopper_takes_them():
    """128 rows at most of one sequence each, the ones with the most keys first."""
    work = prefill.prefill_work([1, 1, 300, 130, 5], [9, 3, 300, 200, 1000], 2, 5)
    assert work.dtype == "int32" and not work[:, 5:].any()
    assert work[:, :5].tolist() == [  # sequence, first row, rows, position of the first, length
        [4, 432, 5, 995, 1000], [2, 258, 44, 256, 300], [2, 130, 128, 128, 300], [3, 430, 2, 198, 200],
        [3, 302, 128, 70, 200], [2, 2, 128, 0, 300],
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("dim", [80, 128])
def test_outputs_are_stored_16_bytes_at_a_time(tmp_path, dim):
    """Four times as many stores of 4 bytes cost a prompt's attention some percent."""
    tile, stages, q_in_regs, _ = prefill.prefill_smem(dim)
    sizes = dict(HEADS=32, KV_HEADS=8, DIM=dim, SIZE=16, BOX=16, TILE=tile, STAGES=stages, Q_IN_REGS=q_in_regs)
    flags = dict(WINDOW=0, SOFTCAP=0, SINKS=0)
    source, made = tmp_path / "prefill.cu", tmp_path / "prefill.ptx"
    source.write_text(jit.variant_text("prefill", {"T": torch.bfloat16, **sizes, **flags}))
    subprocess.run(["nvcc", "-std=c++17", "-ptx", "-arch=sm_90a", "-o", made, source], check=True, timeout=300)
    text = made.read_text()
    assert text.count("st.global.v4") == 2 * -(-dim // 32)
    assert "st.global.u32" not in text
