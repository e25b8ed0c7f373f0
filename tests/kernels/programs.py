"""Programs that kernels are compiled as in tests: source and sizes, one entry for each way that makes a difference."""

import torch
from phalanx.kernels.activation.activation import (
    CLAMPED_SILU,
    CLAMPED_SWIGLU,
    SILU_CLAMPED,
    act_number,
    clamped,
)
from phalanx.kernels.attention import decode, mla_decode, prefill, topk_select
from phalanx.kernels.collective import allreduce
from phalanx.kernels.gemm import pipelined_gemm
from phalanx.kernels.gemm.pipelined_gemm import TileConfig
from phalanx.kernels.moe import expert_mlp, group, host_exchange, plain_experts, quantized_experts, router
from phalanx.kernels.moe.router import RouterParams
from phalanx.kernels.quantized import cuda_layouts, packed_gemm
from phalanx.kernels.quantized.codec import SuperBlock
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.quantized_gemm import GemvConfig, GroupedConfig
from phalanx.kernels.quantized.quantized_gemm import TileConfig as QuantizedTiles
from phalanx.kernels.quantized.quantized_wgmma import WgmmaConfig
from phalanx.kernels.quantized.stack import Stack

HERE = torch.empty(0)  # any tensor
LLAMA = dict(HEADS=32, KV_HEADS=8, DIM=128, SIZE=16, BOX=16, WINDOW=0, SOFTCAP=0, SINKS=0, FP8=0)
OTHER = dict(HEADS=24, KV_HEADS=2, DIM=64, SIZE=128, BOX=64, WINDOW=9, SOFTCAP=1, SINKS=1, FP8=0)
GEMMA = dict(HEADS=16, KV_HEADS=8, DIM=256, SIZE=16, BOX=16, WINDOW=4096, SOFTCAP=1, SINKS=0, FP8=0)
GPT_OSS = dict(HEADS=64, KV_HEADS=8, DIM=64, SIZE=16, BOX=16, WINDOW=128, SOFTCAP=0, SINKS=1, FP8=0)
ROTARY = dict(DIM=128, ROTATED=128, V=2, Q_HEADS=32, KV_HEADS=8, NORM=1, PER=8, INTERLEAVED=0, SIZE=16, FP8=0)
ROTARY_FP8 = ROTARY | dict(DIM=64, ROTATED=32, Q_HEADS=4, KV_HEADS=2, INTERLEAVED=1, FP8=1)
ROTARY_ODD = dict(DIM=10, ROTATED=6, V=1, Q_HEADS=3, KV_HEADS=1, NORM=0, PER=1, INTERLEAVED=1, SIZE=5, FP8=0)
PHI = dict(HEADS=32, KV_HEADS=32, DIM=96, SIZE=16, BOX=16, WINDOW=2047, SOFTCAP=0, SINKS=0, FP8=0)
COPIED, BY_TMA = mla_decode.Tiles("mla_cp_async", 32, 5, 2), mla_decode.Tiles("mla_tma", 64, 8, 2)
HEADS_80, HEADS_112, HEADS_160, HEADS_192 = (LLAMA | dict(DIM=dim) for dim in (80, 112, 160, 192))
LLAMA_FP8, GEMMA_FP8, GPT_OSS_FP8, PHI_FP8 = (one | dict(FP8=1) for one in (LLAMA, GEMMA, GPT_OSS, PHI))


def decode_smem(sizes):
    """How decode.py has decode.cu share out its memory."""
    wide = 1 if sizes["FP8"] else 2
    stages, whole = decode.smem_plan(sizes["HEADS"] // sizes["KV_HEADS"], sizes["DIM"], wide)
    few = min(sizes["BOX"], decode.decode_runs(sizes["DIM"] * wide)[1])
    fixed = dict(SEQUENCES=decode.SEQUENCES, LEAST=decode.LEAST)
    return dict(FEW=few, STAGES=stages, SMEM_BYTES=whole, TILE=decode.decode_tile(sizes["DIM"]), **fixed)


def prefill_smem(sizes):
    """Shared memory as prefill.py and prefill.cu count it."""
    smem = prefill.prefill_smem(sizes["DIM"])
    return dict(TILE=smem.tile, STAGES=smem.stages, Q_IN_REGS=smem.q_in_regs)


def pipelined(dtype, *sizes):
    return "pipelined_gemm", dict(T=dtype, **pipelined_gemm.sizes(*sizes))


def quantized_gemv_of(rows, inputs, config, gate, bias, layout=cuda_layouts.Q8_0):
    return packed_gemm.sizes(rows, inputs, GemvConfig(*config), gate, bias, layout)


def quantized_gemm_of(rows, inputs, config, gate, bias, layout=cuda_layouts.Q8_0):
    return packed_gemm.sizes(rows, inputs, QuantizedTiles(*config), gate, bias, layout)


def quantized_wgmma_of(inputs, config, gate, bias, layout=cuda_layouts.Q8_0):
    return packed_gemm.sizes(64, inputs, WgmmaConfig(*config), gate, bias, layout)


def e4m3_program(dtype, inputs, config, gate, bias, alike):
    return "e4m3_wgmma", dict(
        T=dtype, **packed_gemm.sizes(0, inputs, config, gate, bias, cuda_layouts.wide(128 * alike))
    )


def quantized_experts_of(tiles, inputs, outputs, act, bias, layout=cuda_layouts.Q8_0):
    packed = packed_gemm.Packed(torch.empty(0), 0, layout)
    stack = Stack(packed, (8, outputs, inputs))
    return quantized_experts.sizes(stack, quantized_experts.tile_config(tiles, inputs, layout, bool(act)), act, 8, bias)


def quantized_wgmma_experts_of(dtype, inputs, outputs, rows, of_tile, act, bias, layout=cuda_layouts.Q8_0):
    stack = Stack(packed_gemm.Packed(torch.empty(0), 0, layout), (8, outputs, inputs))
    config = quantized_experts.wgmma_config(rows, of_tile, stack)
    return "quantized_wgmma_experts", dict(T=dtype, **quantized_experts.sizes(stack, config, act, 1, bias))


def e4m3_experts_of(dtype, inputs, outputs, config, act, bias, alike):
    packed = packed_gemm.Packed(torch.empty(0), 0, cuda_layouts.wide(128 * alike))
    stack = Stack(packed, (8, outputs, inputs))
    return "e4m3_experts", dict(T=dtype, **quantized_experts.sizes(stack, config, act, 1, bias))


def by_groups(inputs, config, gate, bias, layout):
    return packed_gemm.sizes(1, inputs, GroupedConfig(*config), gate, bias, layout)


def quantized_pipeline_of(inputs, outputs, act, bias, layout):
    packed = packed_gemm.Packed(torch.empty(0), 0, layout)
    config = quantized_experts.pipeline_config(inputs, layout)
    return quantized_experts.sizes(Stack(packed, (8, outputs, inputs)), config, act, 8, bias)


def expert_gemv_of(inputs, outputs, act, bias, layout, part=False):
    packed = packed_gemm.Packed(torch.empty(0), 0, layout)
    return quantized_experts.gemv_sizes(Stack(packed, (8, outputs, inputs)), act, 8, bias, part)


E4M3 = cuda_layouts.E4M3
WIDE = cuda_layouts.E4M3_WIDE
Q4_K = cuda_layouts.super_blocks(SuperBlock(256, 32, 4, 0))
Q6_K = cuda_layouts.super_blocks(SuperBlock(256, 16, 6, 32, False))
Q5_K = cuda_layouts.super_blocks(SuperBlock(256, 32, 6, 0))
IQ4_XS = cuda_layouts.super_blocks(SuperBlock(256, 32, 8, 128, False))
Q4_1 = cuda_layouts.super_blocks(SuperBlock(32, 32, 4, 0))
MXFP4 = cuda_layouts.MXFP4
INT4, INT4_ZEROS = cuda_layouts.int4(64, False), cuda_layouts.int4(32, True)


V2_ROUTER = RouterParams(6, normalise=False, scale=16.0, groups=8, top_groups=3, group_top=1)
V3_ROUTER = RouterParams(8, "sigmoid", corrected=True, scale=2.5, groups=8, top_groups=4)
PROGRAMS = [
    ("norm", dict(T=torch.bfloat16, N=2048, V=8, THREADS=256, PARTS=2, TERMS=8)),
    ("norm", dict(T=torch.float32, N=33, V=1, THREADS=64, PARTS=1, TERMS=1)),
    ("e4m3_norm", dict(T=torch.bfloat16, N=4096, V=8, THREADS=512, PARTS=1, TERMS=1)),
    ("e4m3_norm", dict(T=torch.float16, N=7168, V=8, THREADS=512, PARTS=2, TERMS=8)),
    ("layer_norm", dict(T=torch.bfloat16, N=4096, V=8, THREADS=512, PARTS=2, WEIGHT=1, BIAS=1)),
    ("layer_norm", dict(T=torch.float32, N=33, V=1, THREADS=64, PARTS=1, WEIGHT=0, BIAS=0)),
    ("layer_norm", dict(T=torch.float16, N=64, V=8, THREADS=32, PARTS=1, WEIGHT=1, BIAS=0)),
    ("activation", dict(T=torch.float16, V=8, ACT=0)),
    ("xielu", dict(T=torch.bfloat16, V=8)),
    ("xielu", dict(T=torch.float32, V=1)),
    ("activation", dict(T=torch.bfloat16, V=8, ACT=1)),
    ("activation", dict(T=torch.float32, V=1, ACT=2)),
    ("activation", dict(T=torch.bfloat16, V=2, ACT=3)),
    ("activation", dict(T=torch.bfloat16, V=8, ACT=act_number(clamped(CLAMPED_SWIGLU, 7.0)))),
    ("activation", dict(T=torch.float32, V=1, ACT=act_number(clamped(CLAMPED_SWIGLU, 65536.0)))),
    ("activation", dict(T=torch.bfloat16, V=8, ACT=act_number(clamped(CLAMPED_SILU, 10.0)))),
    ("activation", dict(T=torch.bfloat16, V=8, ACT=act_number(clamped(SILU_CLAMPED, 16.0)))),
    ("scale_by_gate", dict(T=torch.bfloat16, N=2048, WIDTH=512, V=8, THREADS=256)),
    ("rope", dict(T=torch.bfloat16, C=torch.bfloat16, **ROTARY)),
    ("rope", dict(T=torch.float16, C=torch.float16, **ROTARY_FP8)),
    ("rope", dict(T=torch.float32, C=torch.bfloat16, **ROTARY_ODD)),
    ("gemv", dict(T=torch.bfloat16, I=4096, R=1, OUTS=1, AHEAD=8, GATED=0, WARPS=8, ACT=0, BIAS=0)),
    ("gemv", dict(T=torch.float16, I=14336, R=2, OUTS=2, AHEAD=4, GATED=1, WARPS=8, ACT=0, BIAS=1)),
    ("gemv", dict(T=torch.bfloat16, I=4096, R=2, OUTS=2, AHEAD=4, GATED=1, WARPS=8, ACT=0, BIAS=0)),
    pipelined(torch.bfloat16, 16, 28672, 4096, TileConfig(224, 64), "gelu_tanh", True, False),
    pipelined(torch.float16, 64, 14336, 7168, TileConfig(112, 128), "", False, True),
    pipelined(torch.bfloat16, 64, 24576, 4096, TileConfig(192, 64), "gelu_tanh", True, True),
    pipelined(torch.bfloat16, 8, 4096, 14336, TileConfig(32, 256), "", False, False),
    pipelined(torch.bfloat16, 64, 4096, 14336, TileConfig(64, 256), "", True, True),
    pipelined(torch.float16, 64, 3584, 4096, TileConfig(128, 128), "silu", True, True),
    pipelined(torch.bfloat16, 64, 37888, 3584, TileConfig(96, 128), "silu", True, True),
    pipelined(torch.float16, 64, 100278, 4096, TileConfig(128, 128), "", True, True),
    pipelined(torch.bfloat16, 16, 100278, 4096, TileConfig(128, 128), "", True, False),
    ("quantized_gemv", dict(T=torch.bfloat16, **quantized_gemv_of(1, 4096, (1, 8, 2), "", False))),
    ("quantized_gemv", dict(T=torch.float16, **quantized_gemv_of(4, 14336, (2, 4, 2), "silu", True))),
    ("quantized_gemv", dict(T=torch.bfloat16, **quantized_gemv_of(8, 1056, (2, 4, 2), "", True))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 4096, (224, 128), "gelu_tanh", True))),
    ("quantized_gemm", dict(T=torch.float16, **quantized_gemm_of(8, 14336, (32, 512), "", False))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(32, 4096, (48, 256), "", False))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(64, 4096, (224, 64), "silu", False))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(4096, (256, 64, 128, 1), "gelu_tanh", True))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(4096, (256, 128, 64, 4), "", False))),
    ("quantized_wgmma", dict(T=torch.float16, **quantized_wgmma_of(14336, (192, 128, 128, 2), "", True))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(192, (128, 256, 64, 1), "silu", False))),
    ("dequantize_tiles", dict(T=torch.bfloat16, **packed_gemm.dequantize_sizes(4096, cuda_layouts.Q8_0))),
    ("dequantize_tiles", dict(T=torch.float16, **packed_gemm.dequantize_sizes(96, cuda_layouts.Q8_0))),
    ("quantized_gemv", dict(T=torch.bfloat16, **quantized_gemv_of(1, 4096, (1, 8, 2), "", False, INT4))),
    ("quantized_gemv", dict(T=torch.float16, **quantized_gemv_of(4, 14336, (2, 4, 2), "silu", True, INT4_ZEROS))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 4096, (224, 128), "silu", True, INT4_ZEROS))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(64, 4096, (224, 64), "silu", False, INT4))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(4096, (256, 64, 128, 1), "silu", True, INT4))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(4096, (256, 128, 64, 4), "", False, INT4_ZEROS))),
    ("quantized_wgmma", dict(T=torch.float16, **quantized_wgmma_of(192, (128, 256, 64, 1), "silu", False, INT4_ZEROS))),
    ("dequantize_tiles", dict(T=torch.bfloat16, **packed_gemm.dequantize_sizes(4096, INT4_ZEROS))),
    ("dequantize_tiles", dict(T=torch.float16, **packed_gemm.dequantize_sizes(192, INT4))),
    ("dequantize_tiles", dict(T=torch.bfloat16, **packed_gemm.dequantize_sizes(2880, MXFP4))),
    ("quantized_gemv", dict(T=torch.bfloat16, **quantized_gemv_of(1, 4096, (1, 8, 2), "silu", False, E4M3))),
    ("quantized_gemv", dict(T=torch.float16, **quantized_gemv_of(4, 14336, (2, 4, 2), "", True, E4M3))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 4096, (224, 128), "silu", True, E4M3))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(4096, (256, 64, 128, 1), "silu", True, E4M3))),
    ("quantized_wgmma", dict(T=torch.float16, **quantized_wgmma_of(4096, (256, 128, 64, 4), "", False, E4M3))),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(128, 128, 1), "silu", True, 1),
    e4m3_program(torch.float16, 14336, E4m3Config(128, 64, 2), "", False, 1),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(64, 64, 2), "silu", False, 1),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(256, 64, 1), "", False, 1),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(128, 256, 1, 1, 2), "silu", True, 1),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(128, 128, 1, 1, 2), "silu", True, 1),
    # Tensor cores add up 256 or 512 inputs: with one set of sums or two, in clusters, by parts of the rows.
    e4m3_program(torch.bfloat16, 4096, E4m3Config(128, 128, 1), "silu", True, 4),
    e4m3_program(torch.float16, 14336, E4m3Config(128, 64, 2), "", False, 4),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(128, 256, 1, 1, 2), "silu", True, 4),
    e4m3_program(torch.bfloat16, 4096, E4m3Config(128, 192, 1, 1, 2, 192), "silu", False, 4),
    e4m3_program(torch.float16, 1792, E4m3Config(128, 192, 1, matmul=192), "", True, 2),
    ("quantized_gemv", dict(T=torch.bfloat16, **quantized_gemv_of(1, 4096, (1, 4, 2), "silu", False, WIDE))),
    ("quantized_gemv", dict(T=torch.float16, **quantized_gemv_of(4, 14336, (2, 2, 2), "", True, WIDE))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 4096, (224, 256), "silu", True, WIDE))),
    ("dequantize_tiles", dict(T=torch.bfloat16, **packed_gemm.dequantize_sizes(4096, WIDE))),
    ("e4m3_rows", dict(T=torch.bfloat16, I=4096, THREADS=128)),
    ("e4m3_rows", dict(T=torch.float16, I=14336, THREADS=448)),
    ("dequantize_tiles", dict(T=torch.bfloat16, **packed_gemm.dequantize_sizes(4096, E4M3))),
    ("quantized_gemv", dict(T=torch.bfloat16, **quantized_gemv_of(1, 4096, (1, 8, 2), "", False, Q4_K))),
    ("quantized_gemv", dict(T=torch.float16, **quantized_gemv_of(4, 14336, (2, 2, 2), "silu", True, Q6_K))),
    ("grouped_gemv", dict(T=torch.bfloat16, **by_groups(4096, (2, 4), "silu", False, Q4_K))),
    ("grouped_gemv", dict(T=torch.float16, **by_groups(14336, (1, 2), "", True, Q6_K))),
    ("grouped_gemv", dict(T=torch.bfloat16, **by_groups(4096, (1, 4), "", True, Q4_1))),
    ("grouped_gemv", dict(T=torch.bfloat16, **by_groups(4096, (1, 4), "", False, Q5_K))),
    ("grouped_gemv", dict(T=torch.bfloat16, **by_groups(4096, (1, 4), "", False, IQ4_XS))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 4096, (224, 256, True), "silu", True, Q4_K))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 14336, (32, 512), "", True, Q4_K))),
    ("quantized_gemm", dict(T=torch.float16, **quantized_gemm_of(8, 14336, (32, 256, True), "", True, Q4_K))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(64, 4096, (112, 64), "silu", False, Q6_K))),
    ("quantized_gemm", dict(T=torch.bfloat16, **quantized_gemm_of(16, 4096, (112, 256, True), "", True, Q5_K))),
    ("quantized_wgmma", dict(T=torch.bfloat16, **quantized_wgmma_of(4096, (256, 64, 128, 1), "silu", True, Q4_K))),
    ("quantized_wgmma", dict(T=torch.float16, **quantized_wgmma_of(4096, (128, 128, 64, 4), "", False, Q6_K))),
    ("dequantize_tiles", dict(T=torch.bfloat16, **packed_gemm.dequantize_sizes(4096, Q4_K))),
    ("dequantize_tiles", dict(T=torch.float16, **packed_gemm.dequantize_sizes(192, Q4_1))),
    ("quantized_experts", dict(T=torch.bfloat16, **quantized_experts_of(1, 2048, 1536, "silu", False, Q4_K))),
    ("quantized_experts", dict(T=torch.bfloat16, **quantized_experts_of(8, 2048, 1536, "silu", True, Q6_K))),
    ("quantized_experts", dict(T=torch.float16, **quantized_experts_of(8, 768, 2048, "", True, INT4_ZEROS))),
    ("quantized_experts", dict(T=torch.bfloat16, **quantized_experts_of(2, 768, 2048, "", False, E4M3))),
    ("quantized_experts", dict(T=torch.bfloat16, **quantized_experts_of(8, 2048, 1536, "silu", False, WIDE))),
    ("quantized_experts", dict(T=torch.bfloat16, **quantized_experts_of(4, 2880, 5760, CLAMPED_SWIGLU, True, MXFP4))),
    ("quantized_experts", dict(T=torch.bfloat16, **quantized_experts_of(4, 4096, 28672, "gelu", False))),
    ("quantized_pipeline", dict(T=torch.bfloat16, **quantized_pipeline_of(2048, 1536, "silu", False, Q4_K))),
    ("quantized_pipeline", dict(T=torch.float16, **quantized_pipeline_of(768, 2048, "", False, Q4_K))),
    ("quantized_pipeline", dict(T=torch.bfloat16, **quantized_pipeline_of(2048, 1536, "gelu", True, Q6_K))),
    ("quantized_pipeline", dict(T=torch.float16, **quantized_pipeline_of(768, 2048, "", True, INT4_ZEROS))),
    ("quantized_pipeline", dict(T=torch.bfloat16, **quantized_pipeline_of(768, 2048, "", False, Q6_K))),
    ("quantized_pipeline", dict(T=torch.bfloat16, **quantized_pipeline_of(2048, 1536, "silu", False, Q5_K))),
    ("quantized_pipeline", dict(T=torch.bfloat16, **quantized_pipeline_of(2048, 1536, "silu", False, WIDE))),
    ("quantized_pipeline", dict(T=torch.bfloat16, **quantized_pipeline_of(2880, 5760, CLAMPED_SWIGLU, True, MXFP4))),
    ("quantized_expert_gemv", dict(T=torch.bfloat16, **expert_gemv_of(2048, 1536, "silu", False, Q4_K))),
    ("quantized_expert_gemv", dict(T=torch.bfloat16, **expert_gemv_of(768, 2048, "", True, Q6_K, part=True))),
    ("quantized_expert_gemv", dict(T=torch.bfloat16, **expert_gemv_of(2880, 2880, "", True, MXFP4))),
    ("quantized_expert_gemv", dict(T=torch.float16, **expert_gemv_of(2048, 1536, "silu", True, WIDE))),
    ("quantized_expert_gemv", dict(T=torch.float16, **expert_gemv_of(768, 2048, "", False, INT4_ZEROS))),
    e4m3_experts_of(torch.bfloat16, 2048, 1536, E4m3Config(128, 32, 1), "silu", False, 1),
    e4m3_experts_of(torch.float16, 768, 2048, E4m3Config(128, 16, 1, matmul=16), "", True, 2),
    e4m3_experts_of(torch.bfloat16, 2048, 1536, E4m3Config(128, 64, 1), "silu", True, 4),
    e4m3_experts_of(torch.bfloat16, 1408, 2048, E4m3Config(128, 128, 1, 2), "", False, 1),
    e4m3_experts_of(torch.bfloat16, 2048, 2816, E4m3Config(192, 128, 1, 2), "gelu_tanh", False, 4),
    e4m3_experts_of(torch.bfloat16, 2048, 1536, E4m3Config(128, 192, 1, 2, matmul=96), "silu", False, 4),
    e4m3_experts_of(torch.bfloat16, 768, 2048, E4m3Config(192, 128, 1), "", False, 1),
    e4m3_experts_of(torch.bfloat16, 768, 2048, E4m3Config(128, 256, 1, 2, matmul=128), "", False, 2),
    quantized_wgmma_experts_of(torch.bfloat16, 2880, 5760, 48, 256, CLAMPED_SWIGLU, True, MXFP4),
    quantized_wgmma_experts_of(torch.bfloat16, 2880, 2880, 64, 256, "", True, MXFP4),
    quantized_wgmma_experts_of(torch.bfloat16, 2048, 1536, 32, 384, "silu", False, INT4),
    quantized_wgmma_experts_of(torch.float16, 768, 2048, 16, 256, "", False, INT4_ZEROS),
    quantized_wgmma_experts_of(torch.bfloat16, 2048, 1536, 128, 256, "gelu_tanh", True, Q4_K),
    quantized_wgmma_experts_of(torch.bfloat16, 768, 2048, 96, 256, "", False, Q6_K),
    quantized_wgmma_experts_of(torch.float16, 14336, 4096, 128, 256, "", True, Q4_1),
    quantized_wgmma_experts_of(torch.bfloat16, 4096, 28672, 32, 384, "silu", False, Q4_K),
    quantized_wgmma_experts_of(torch.float16, 4096, 28672, 64, 256, "silu", True),
    quantized_wgmma_experts_of(torch.bfloat16, 576, 2048, 16, 384, "", False, E4M3),
    ("e4m3_routed", dict(T=torch.bfloat16, **group.encode_sizes(128, 2048, 8))),
    ("e4m3_routed", dict(T=torch.float16, **group.encode_sizes(60, 14336, 0))),
    ("wgmma_experts", dict(T=torch.bfloat16, **plain_experts.wgmma_sizes(1536, 2048, "silu", False, 192))),
    ("wgmma_experts", dict(T=torch.float16, **plain_experts.wgmma_sizes(2880, 2880, "", True, 192))),
    ("wgmma_experts", dict(T=torch.bfloat16, **plain_experts.wgmma_sizes(5760, 2880, "gelu", True, 128))),
    ("wgmma_experts", dict(T=torch.bfloat16, **plain_experts.wgmma_sizes(4096, 14336, "", False, 128))),
    ("wgmma_experts", dict(T=torch.bfloat16, **plain_experts.wgmma_sizes(1856, 2688, "relu2", False, 192, False))),
    ("wgmma_experts", dict(T=torch.float16, **plain_experts.wgmma_sizes(928, 2688, "silu", True, 128, False))),
    ("wgmma_experts", dict(T=torch.bfloat16, **plain_experts.wgmma_sizes(2688, 928, "", False, 128, False))),
    ("gather_routed", dict(T=torch.bfloat16, **group.gather_sizes(128, 2048, 8))),
    ("gather_routed", dict(T=torch.float16, **group.gather_sizes(8, 14336, 2))),
    ("prefill", dict(T=torch.bfloat16, **LLAMA, **prefill_smem(LLAMA))),
    ("prefill", dict(T=torch.float16, **OTHER, **prefill_smem(OTHER))),
    ("prefill", dict(T=torch.bfloat16, **GEMMA, **prefill_smem(GEMMA))),
    ("decode", dict(T=torch.bfloat16, **LLAMA, **decode_smem(LLAMA), ROTATE=1, NORM=0)),
    ("decode", dict(T=torch.float16, **OTHER, **decode_smem(OTHER), ROTATE=1, NORM=1)),
    ("decode", dict(T=torch.bfloat16, **LLAMA_FP8, **decode_smem(LLAMA_FP8), ROTATE=1, NORM=0)),
    ("decode", dict(T=torch.float16, **GEMMA_FP8, **decode_smem(GEMMA_FP8), ROTATE=1, NORM=1)),
    ("decode", dict(T=torch.bfloat16, **LLAMA, **decode_smem(LLAMA), ROTATE=0, NORM=0)),
    ("decode", dict(T=torch.bfloat16, **GEMMA, **decode_smem(GEMMA), ROTATE=1, NORM=1)),
    ("decode", dict(T=torch.float16, **GEMMA, **decode_smem(GEMMA), ROTATE=0, NORM=0)),
    ("prefill", dict(T=torch.bfloat16, **GPT_OSS, **prefill_smem(GPT_OSS))),
    ("decode", dict(T=torch.bfloat16, **GPT_OSS, **decode_smem(GPT_OSS), ROTATE=1, NORM=0)),
    ("decode", dict(T=torch.float16, **GPT_OSS_FP8, **decode_smem(GPT_OSS_FP8), ROTATE=1, NORM=0)),
    ("prefill", dict(T=torch.bfloat16, **PHI, **prefill_smem(PHI))),
    ("prefill", dict(T=torch.float16, **HEADS_80, **prefill_smem(HEADS_80))),
    ("prefill", dict(T=torch.bfloat16, **HEADS_112, **prefill_smem(HEADS_112))),
    ("prefill", dict(T=torch.bfloat16, **HEADS_160, **prefill_smem(HEADS_160))),
    ("prefill", dict(T=torch.bfloat16, **HEADS_192, **prefill_smem(HEADS_192))),
    ("decode", dict(T=torch.bfloat16, **PHI, **decode_smem(PHI), ROTATE=1, NORM=0)),
    ("decode", dict(T=torch.bfloat16, **PHI_FP8, **decode_smem(PHI_FP8), ROTATE=1, NORM=1)),
    ("decode", dict(T=torch.float16, **HEADS_80, **decode_smem(HEADS_80), ROTATE=0, NORM=0)),
    ("decode", dict(T=torch.bfloat16, **HEADS_112, **decode_smem(HEADS_112), ROTATE=1, NORM=1)),
    ("decode", dict(T=torch.bfloat16, **HEADS_160, **decode_smem(HEADS_160), ROTATE=1, NORM=0)),
    ("decode", dict(T=torch.bfloat16, **HEADS_192, **decode_smem(HEADS_192), ROTATE=1, NORM=1)),
    ("mla_decode", dict(T=torch.bfloat16, **mla_decode.sizes(16, 16, COPIED))),
    ("mla_decode", dict(T=torch.float16, **mla_decode.sizes(20, 5, COPIED._replace(panels=8, per_sm=1)))),
    ("mla_decode", dict(T=torch.float16, **mla_decode.sizes(128, 64, COPIED._replace(panels=4, per_sm=1)))),
    ("mla_decode", dict(T=torch.bfloat16, **mla_decode.sizes(16, 16, COPIED._replace(panels=8, per_sm=1), True))),
    ("mla_decode", dict(T=torch.float16, **mla_decode.sizes(20, 48, COPIED._replace(panels=8, per_sm=1), True))),
    ("mla_decode", dict(T=torch.bfloat16, **mla_decode.sizes(16, 16, BY_TMA, True))),
    ("mla_decode", dict(T=torch.float16, **mla_decode.sizes(20, 48, BY_TMA, True))),
    ("topk_select", dict(T=torch.float32, **topk_select.sizes(1))),
    ("topk_select", dict(T=torch.float32, **topk_select.sizes(8))),
    ("decode_inputs", dict(T=torch.int64, QUERY=1)),
    ("decode_inputs", dict(T=torch.int64, QUERY=4)),
    ("router", dict(T=torch.bfloat16, **router.sizes(8, 128, 2048, RouterParams(8), False))),
    ("router", dict(T=torch.bfloat16, **router.sizes(4, 256, 7168, V3_ROUTER, True))),
    ("router", dict(T=torch.bfloat16, **router.sizes(1, 160, 5120, V2_ROUTER, False))),
    ("router", dict(T=torch.float16, **router.sizes(1, 60, 2880, RouterParams(3, "sigmoid", normalise=False), True))),
    ("expert_gemv", dict(T=torch.bfloat16, **plain_experts.gemv_sizes(2048, 768, 8, "silu"))),
    ("expert_gemv", dict(T=torch.float16, **plain_experts.gemv_sizes(2880, 1440, 3, "gelu"))),
    ("expert_gemv", dict(T=torch.bfloat16, **plain_experts.gemv_sizes(2048, 768, 8, "silu", part=True))),
    ("expert_gemv", dict(T=torch.bfloat16, **plain_experts.gemv_sizes(2688, 1856, 6, "relu2", gated=False))),
    ("expert_mlp", dict(T=torch.bfloat16, **expert_mlp.sizes(2048, 1408, "silu", 6, 4))),
    ("expert_mlp", dict(T=torch.bfloat16, **expert_mlp.sizes(2048, 1408, "silu", 6, 2))),
    ("expert_mlp", dict(T=torch.bfloat16, **expert_mlp.sizes(2048, 768, "silu", 8, 1))),
    ("expert_mlp", dict(T=torch.float16, **expert_mlp.sizes(4096, 14336, "gelu", 2, 1))),
    ("expert_mlp", dict(T=torch.bfloat16, **expert_mlp.sizes(128, 192, "silu", 2, 1))),
    ("expert_mlp", dict(T=torch.bfloat16, **expert_mlp.sizes(2688, 1856, "relu2", 6, 1, False))),
    ("expert_mlp", dict(T=torch.bfloat16, **expert_mlp.sizes(2688, 1856, "relu2", 6, 4, False))),
    ("expert_mlp", dict(T=torch.float16, **expert_mlp.sizes(2688, 928, "silu", 6, 2, False))),
    ("host_exchange", dict(T=torch.bfloat16, **host_exchange.sizes(HERE, HERE, HERE, HERE))),
    ("host_exchange", dict(T=torch.float32, **host_exchange.sizes(HERE))),
    ("host_exchange", dict(T=torch.float16, **host_exchange.sizes(HERE, None, None, HERE))),
    ("group", dict(T=torch.int64, EXPERTS=128, ROWS=16, THREADS=group.THREADS, PART=group.PART)),
    ("group", dict(T=torch.int64, EXPERTS=60, ROWS=128, THREADS=group.THREADS, PART=group.PART)),
    ("embedding", dict(T=torch.bfloat16, V=8)),
    ("embedding", dict(T=torch.float32, V=1)),
    ("block_rows", dict(T=torch.bfloat16, V=8, THREADS=256, SPREAD=0, OTHERS=0)),
    ("block_rows", dict(T=torch.bfloat16, V=1, THREADS=256, SPREAD=1, OTHERS=0)),
    ("block_rows", dict(T=torch.bfloat16, V=8, THREADS=256, SPREAD=0, OTHERS=1)),
    ("argmax", dict(T=torch.bfloat16, V=8)),
    ("argmax", dict(T=torch.float32, V=1)),
    ("logits", dict(T=torch.bfloat16, V=8)),
    ("logits", dict(T=torch.float32, V=1)),
    ("token_mask", dict(T=torch.bfloat16, COLUMNS=8)),
    ("token_mask", dict(T=torch.float32, COLUMNS=8)),
    ("allreduce", dict(T=torch.bfloat16, SIZE=4, V=8, THREADS=512, **allreduce.BUFFER_SIZES)),
    ("allreduce", dict(T=torch.float32, SIZE=2, V=1, THREADS=128, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.bfloat16, SIZE=2, N=4096, V=8, THREADS=512, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.bfloat16, SIZE=4, N=8192, V=8, THREADS=512, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.bfloat16, SIZE=4, N=8192, V=8, THREADS=1024, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.float16, SIZE=8, N=8192, V=8, THREADS=1024, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.float16, SIZE=8, N=8192, V=8, THREADS=512, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.float32, SIZE=3, N=33, V=1, THREADS=64, **allreduce.BUFFER_SIZES)),
    ("allreduce_norm", dict(T=torch.bfloat16, SIZE=4, N=1, V=1, THREADS=32, **allreduce.BUFFER_SIZES)),
]
