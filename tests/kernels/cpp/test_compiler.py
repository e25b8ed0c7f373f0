"""C++ is compiled once on a node, by what compiler there is; where none works, torch computes, and says why."""

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import phalanx
import pytest
import torch
from phalanx.kernels import kernel_cache
from phalanx.kernels.cpp import compiler, ops
from phalanx.kernels.gemm.linear import PACK_FROM, linear, pack

from ...kept import kept, version

SMALL, OTHER = "pool", "argmax"  # the sources that compile fastest
GENERIC = "generic"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    compiler._load.cache_clear()
    yield tmp_path
    compiler._load.cache_clear()


@pytest.fixture
def found_anew():
    """Operations are looked for again, here and after."""
    caches = ops.libraries, ops.available, ops.op
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def counting(tmp_path: Path, monkeypatch) -> Path:
    """$CXX is the machine's compiler; the file has a line for each time that it was called."""
    count, real = tmp_path / "count", shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f'echo x >> {count}; exec {real} "$@"'))
    return count


def libraries(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("phalanx-kernels-*/*.so"))


def test_a_source_is_compiled_once(monkeypatch, tmp_path):
    count = counting(tmp_path, monkeypatch)
    for _ in range(2):
        assert compiler.load(SMALL, GENERIC).pool_run
        compiler._load.cache_clear()
    assert count.read_text() == "x\n" and len(libraries(tmp_path)) == 1
    assert [p.name for p in libraries(tmp_path)[0].parent.iterdir() if p.is_dir()] == [], "nothing is left behind"


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_made_again(monkeypatch, tmp_path, damage):
    count = counting(tmp_path, monkeypatch)
    compiler.load(SMALL, GENERIC)
    (file,) = libraries(tmp_path)
    whole = file.read_bytes()
    file.unlink()  # what this process has mapped stays as it is
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    compiler._load.cache_clear()
    assert compiler.load(SMALL, GENERIC).pool_run
    assert file.read_bytes()[-32:] != b"" and count.read_text() == "x\nx\n"


def test_of_two_processes_one_compiles(monkeypatch, tmp_path):
    """One source, and then all of a list, which begins with a trial; of that one of them says so."""
    count = counting(tmp_path, monkeypatch)
    code = (
        "import sys, logging; logging.basicConfig(level='INFO', stream=sys.stdout)\n"
        "from phalanx.kernels.cpp import compiler; one, other, isa = sys.argv[1:]\n"
        "print(bool(compiler.load(one, isa).pool_run)); compiler.load_all([other], isa)"
    )
    command = [sys.executable, "-c", code, SMALL, OTHER, GENERIC]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate(timeout=100)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0] and all("True\n" in one for one in said)
    assert "".join(said).count("compiling C++ kernels for") == 1
    assert count.read_text() == "x\n" * 3


def test_without_a_compiler_torch_computes(monkeypatch, found_anew, caplog):
    monkeypatch.setattr(compiler, "compilers", lambda: iter(()))
    weight = torch.randn(PACK_FROM // 64, 128)
    with caplog.at_level("WARNING", "phalanx"):
        assert not ops.available() and not ops.available() and pack(weight).is_mkldnn
        assert linear(weight[:2], weight).shape == (2, len(weight))
    (said,) = caplog.messages
    assert "install g++" in said and "ziglang" in said


def test_the_next_compiler_is_taken_where_one_is_broken(monkeypatch, tmp_path):
    counting(tmp_path, monkeypatch)
    works = os.environ["CXX"]
    broken = script(tmp_path / "broken", "echo sorry >&2; exit 3")
    silent = script(tmp_path / "silent", "exit 0")
    monkeypatch.setattr(compiler, "compilers", lambda: iter([[str(tmp_path / "absent")], [broken], [silent], [works]]))
    assert compiler.load(SMALL, GENERIC).pool_run


def test_broken_compilers_are_named_with_their_words(monkeypatch, tmp_path, found_anew, caplog):
    broken = script(tmp_path / "broken", "for i in 1 2 3 4 5 6 7 8 9 10 11; do echo sorry $i >&2; done; exit 3")
    monkeypatch.setattr(compiler, "compilers", lambda: iter([[str(tmp_path / "absent")], [broken]]))
    with caplog.at_level("WARNING", "phalanx"):
        assert not ops.available()
    (said,) = caplog.messages
    assert "absent" in said and "exit code 3" in said and "sorry 1" in said and "sorry 11" not in said


def test_the_next_instruction_set_is_taken_where_a_compiler_is_old(monkeypatch, found_anew, caplog):
    def load_all(names, isa):
        if isa == "amx":
            raise compiler.CompileError("g++: unrecognized command-line option '-mamx-tile'")
        return {"pool": isa}

    monkeypatch.setattr(compiler, "isas", lambda: ["amx", "avx512", GENERIC])
    monkeypatch.setattr(compiler, "load_all", load_all)
    with caplog.at_level("WARNING", "phalanx"):
        assert ops.available() and ops.libraries() == {"pool": "avx512"}
    (said,) = caplog.messages
    assert "unrecognized command-line option '-mamx-tile'" in said


def test_a_cache_that_cannot_be_kept(monkeypatch, tmp_path, found_anew, caplog):
    (tmp_path / f"phalanx-kernels-{os.getuid()}").touch()
    with caplog.at_level("WARNING", "phalanx"):
        assert not ops.available()
    assert "TMPDIR" in caplog.text


def test_who_compiles_says_so_before(monkeypatch, tmp_path, caplog):
    """Also where an instruction set that no compiler here knows comes first, which is tried at each start."""
    counting(tmp_path, monkeypatch)
    at, compiled = compiler.compile_text, []

    def compile_text(text, isa, name):
        if isa == "amx":
            raise compiler.CompileError("g++: unrecognized command-line option '-mamx-tile'")
        compiled.append((name, len(caplog.messages)))
        return at(text, isa, name)

    monkeypatch.setattr(compiler, "compile_text", compile_text)
    for said in (1, 0):
        compiler._load.cache_clear()
        with caplog.at_level("INFO", "phalanx"), pytest.raises(compiler.CompileError):
            compiler.load_all([SMALL], "amx")
        assert not caplog.messages
        with caplog.at_level("INFO", "phalanx"):
            assert compiler.load_all([SMALL], GENERIC)[SMALL].pool_run
        assert [f"kernels for {GENERIC}" in one for one in caplog.messages] == [True] * said
        caplog.clear()
    assert compiled == [("trial", 0), (SMALL, 1)]


@pytest.mark.parametrize("commands", [[], [["false"]]])
def test_nothing_is_said_where_no_compiler_works(monkeypatch, caplog, commands):
    monkeypatch.setattr(compiler, "compilers", lambda: iter(commands))
    with caplog.at_level("INFO", "phalanx"), pytest.raises(compiler.CompileError):
        compiler.load_all([SMALL], GENERIC)
    assert not caplog.messages


def test_zig_compiles(tmp_path, monkeypatch):
    pytest.importorskip("ziglang")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    (command,) = compiler.compilers()
    assert command[1:4] == ["-P", "-m", "ziglang"]
    assert compiler.load(SMALL, compiler.isas()[0]).pool_run


def test_the_best_instruction_set_comes_first(monkeypatch):
    avx2, amx = {"avx2", "fma", "f16c"}, {flag for needed, _ in compiler.ISAS.values() for flag in needed}
    flags = [set(), avx2, avx2 | set(compiler._AVX512), avx2 | {"avx512f"}, amx]
    monkeypatch.setattr(compiler, "_tiles_permitted", lambda: False)
    found = []
    for present in flags:
        monkeypatch.setattr(compiler, "_cpu_flags", lambda present=present: frozenset(present))
        found.append(compiler.isas())
    assert found == [["generic"], ["avx2", "generic"], ["avx512", "avx2", "generic"], ["avx2", "generic"],
                     [name for name in compiler.ISAS if name != "amx"]]  # fmt: skip
    monkeypatch.setattr(compiler, "_tiles_permitted", lambda: True)
    assert compiler.isas() == list(compiler.ISAS)


def test_kinds_of_aarch64(monkeypatch, tmp_path):
    """Features that /proc/cpuinfo lists on Grace, Graviton 2 and a Cortex-A72, and where SVE's vectors are longer."""
    grace = (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 "
        "sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm sb dcpodp sve2 sveaes svepmull svebitperm svesha3 "
        "svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 dgh bti"
    )
    graviton_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
    cortex_a72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
    monkeypatch.setattr(compiler, "ISAS", compiler.AARCH64)
    monkeypatch.setattr(compiler, "CPUINFO", tmp_path / "cpuinfo")
    found = []
    a64fx = "fp asimd evtstrm sha1 sha2 crc32 atomics cpuid asimdrdm fphp asimdhp fcma dcpop sve"
    cases = (grace, 128), (graviton_2, 0), (cortex_a72, 0), (grace, 256), (a64fx, 512), (a64fx, 1024)
    for features, bits in cases:
        monkeypatch.setattr(compiler, "_sve_bits", lambda bits=bits: bits)
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\nCPU part\t: 0xd4f\n")
        compiler._cpu_flags.cache_clear()
        found.append(compiler.isas())
    compiler._cpu_flags.cache_clear()
    neon = ["neon_bf16", "neon_dotprod", "generic"]
    assert found == [neon, neon[1:], neon[2:], ["sve256_bf16", "sve256", *neon], ["sve512", "generic"], ["generic"]]


def test_libraries_of_another_machine_are_others(monkeypatch):
    """Nodes of both kinds may share the folder."""
    here = compiler._file_name(SMALL, GENERIC)
    monkeypatch.setattr(compiler, "MACHINE", "another")
    compiler._file_name.cache_clear()
    assert compiler._file_name(SMALL, GENERIC) != here
    compiler._file_name.cache_clear()


def test_macs_name_their_features(monkeypatch):
    """An M2 as macOS's kernel tells of it."""
    monkeypatch.setattr(compiler.sys, "platform", "darwin")
    monkeypatch.setattr(compiler, "_sysctl", lambda name: int(name != "hw.optional.arm.FEAT_BF16"))
    monkeypatch.setattr(compiler, "ISAS", compiler.AARCH64)
    compiler._cpu_flags.cache_clear()
    assert compiler.isas() == ["neon_dotprod", "generic"]
    compiler._cpu_flags.cache_clear()


SYSTEM = re.compile(r"^#include <.*>\n", re.MULTILINE)


def own_text(command, text: str, isa: str) -> str:
    """The text of a source for an instruction set, the system's headers left out."""
    line = [*command, *compiler.ISAS[isa][1], "-E", "-P", "-x", "c++", "-"]
    given = SYSTEM.sub("", text)
    return subprocess.run(line, input=given, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.long
@pytest.mark.parametrize("isa", compiler.ISAS)
def test_sources_compile_without_a_warning(isa, tmp_path):
    """For every instruction set, whatever this processor has: those sources that are not the same, and compiled, for
    the next lesser one."""
    command = next(compiler.compilers(), None)
    if command is None:
        pytest.skip("no C++ compiler")
    names = list(compiler.ISAS)
    lesser = names[names.index(isa) + 1 :][:1]
    texts = {source: compiler.source_text(source) for source in compiler.SOURCES}
    line = [*command, *compiler.FLAGS, "-O1", "-Werror", *compiler.ISAS[isa][1]]

    def warnings(source: str) -> str:
        file, text = tmp_path / f"{source}.cpp", texts[source]
        if any(own_text(command, text, one) == own_text(command, text, isa) for one in lesser):
            return ""
        file.write_text(text)

        def make(compiled: Path) -> None:
            command = [*line, "-c", str(file), "-o", str(compiled)]
            subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)

        try:
            kept(make, *line, version(*command), text)
        except subprocess.CalledProcessError as stop:
            return stop.stderr
        return ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        assert not any(found := list(pool.map(warnings, texts))), "".join(found)[:2000]


def test_sources_are_packaged():
    text = (Path(phalanx.__file__).resolve().parent / "setup.cfg").read_text()
    assert "*/*.cpp" in text and "cpp/*.h" in text


def test_kernels_are_compiled_ahead_without_torch(monkeypatch, tmp_path):
    """Compiles as `make install` does while torch is fetched; a start then calls no compiler."""
    count = counting(tmp_path, monkeypatch)
    monkeypatch.setattr(compiler, "SOURCES", {name: compiler.SOURCES[name] for name in (SMALL, OTHER)})
    isa = compiler.compile_ahead()
    made = count.read_text().count("x")
    assert made == 3  # two sources, and a trial of the compiler
    compiler._load.cache_clear()
    assert set(compiler.load_all([SMALL, OTHER], isa)) == {SMALL, OTHER} and count.read_text().count("x") == made
    blocked = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import phalanx.kernels.cpp.compiler"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=60)


def test_the_log_counts_what_is_compiled(monkeypatch):
    monkeypatch.setattr(compiler, "LOG_EVERY", 0.01)
    go = threading.Event()
    monkeypatch.setattr(compiler, "load", lambda name, isa: go.wait(30) and ctypes.CDLL(None))
    monkeypatch.setattr(compiler.log, "info", lambda *told: go.set() if told[1:] == (0, 2) else None)
    assert len(compiler._load_together([SMALL, OTHER], GENERIC)) == 2 and go.is_set()
