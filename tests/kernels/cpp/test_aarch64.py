"""C++ kernels of aarch64, compiled by a cross compiler and run under QEMU: what is emulated is the processor alone, so
that every test of the kernels is asked, with its references (tests/kernels/emulated.py)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from phalanx.kernels.cpp import compiler

from .. import emulated

ABSENT = emulated.missing()
pytestmark = [pytest.mark.long, pytest.mark.timeout(1600), pytest.mark.skipif(ABSENT != "", reason=ABSENT)]

KERNELS = Path(__file__).parents[1]
EVERYTHING = (
    "activation/test_activation_cpu.py", "activation/test_xielu_cpu.py", "attention/test_chunks.py",
    "attention/test_cpu_decode.py", "attention/test_fp8_cache.py", "embedding/test_embedding_cpu.py",
    "gemm/test_cpu_gemm.py", "moe/test_experts_cpu.py", "moe/test_host_choice.py", "moe/test_host_experts.py",
    "moe/test_router.py",
    "norm/test_layer_norm_cpu.py", "norm/test_norm_cpu.py", "quantized/test_blocks_cpu.py",
    "quantized/test_e4m3_cpu.py", "quantized/test_halves.py", "quantized/test_packing_cpu.py",
    "quantized/test_q8_0.py", "quantized/test_super_blocks.py", "recurrent/test_gated_delta.py",
    "recurrent/test_ssd.py", "rope/test_rope_cpu.py", "sampling/test_argmax_cpu.py", "sampling/test_logits_cpu.py",
)  # fmt: skip
LEFT_OUT = "-k", "not whoever_is_late"  # it calls operations itself, by their addresses


def emulate(tmp_path: Path, isa: str, cpu: str, files: tuple[str, ...], *more: str) -> dict[str, int]:
    """Calls of each operation in these tests, which pass."""
    environ = os.environ | {emulated.GIVEN: f"{isa} {cpu} {tmp_path}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "phalanx.tests.kernels.emulated", "-p", "no:cacheprovider"]
    command += ["--timeout", "900"]  # one test compiles all
    command += ["--basetemp", str(tmp_path / "tests"), "-m", "not long", *more]
    command += [str(KERNELS / name) for name in files]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=1500, cwd=KERNELS.parents[1],
        preexec_fn=lambda: os.nice(10),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return json.loads((tmp_path / "called.json").read_text())


@pytest.mark.parametrize(
    "isa, cpu",
    [("neon_bf16", "max,sve128=on,sve256=off"), ("sve256_bf16", "max,sve256=on"), ("sve512", "max,sve512=on")],
    ids=("Grace", "Graviton 3", "A64FX"),
)
def test_every_operation(isa, cpu, tmp_path):
    """QEMU's `max` has the dot products of bytes and of bf16 that Neoverse V1 and V2 have, and SVE."""
    files = *EVERYTHING, "cpp/emulated_rest.py"
    called = emulate(tmp_path, isa, cpu, files, *LEFT_OUT)
    print(f"{len(called)} operations, {sum(called.values())} calls")
    assert len(called) > 200 and not [name for name, times in called.items() if not times]


@pytest.mark.parametrize(
    "isa, wanted",
    [
        ("neon_bf16", {"usdot v", "bfdot v"}), ("neon_dotprod", {"sdot v"}), ("generic", set()),
        ("sve256_bf16", {"usdot z", "bfdot z"}), ("sve512", {"sdot z"}),
    ],
)  # fmt: skip
def test_dot_products_are_those_of_the_processor(isa, wanted, tmp_path):
    """Instructions with NEON's registers, v, or SVE's, z, in linears of q8_0 and of bf16."""
    found = set()
    for source in ("q8_0_cpu", "cpu_gemm"):
        file = tmp_path / f"{source}.cpp"
        file.write_text(compiler.source_text(source))
        line = [emulated.COMPILER, *compiler.FLAGS, *compiler.AARCH64[isa][1], "-S", "-o", "-", str(file)]
        text = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True).stdout
        found |= {f"{name} {bank}" for name, bank in re.findall(r"^\t(\w*dot)\t([vz])", text, re.MULTILINE)}
    assert found == wanted


# Sources whose instructions differ: everything that reads quantised weights, and bf16.
@pytest.mark.parametrize(
    "isa, cpu",
    [
        ("neon_dotprod", "neoverse-n1"), ("generic", "cortex-a72"), ("sve256", "max,sve256=on"),
        ("sve512_bf16", "max,sve512=on"),
    ],
)  # fmt: skip
def test_lesser_processors(tmp_path, isa, cpu):
    files = "quantized/test_blocks_cpu.py", "quantized/test_q8_0.py", "gemm/test_cpu_gemm.py", "norm/test_norm_cpu.py"
    called = emulate(tmp_path, isa, cpu, (*files, "quantized/test_e4m3_cpu.py"), *LEFT_OUT)
    print(f"{sum(called.values())} calls of {sum(map(bool, called.values()))} operations")
    assert sum(map(bool, called.values())) > 30
