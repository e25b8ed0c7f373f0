"""The order of the house: a room imports only from rooms further down, relatively, and light rooms stay light."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import phalanx
import pytest

ROOT = Path(phalanx.__file__).resolve().parent

# From the top. A module belongs to the first room whose name begins its own; `.*`: what is inside a package alone. The
# modules of a room may import each other.
ROOMS = (
    "launcher",
    "rank.__main__",
    "rank.server",
    "rank.scheduler",
    "rank.worker",
    "rank.convert",
    "rank.model.measure",
    "rank.model.drafts",
    "rank.model.load",
    "rank.model.choices",
    "rank.model.load_memory",
    "rank.model.fingerprint",
    "rank.model.architectures.*",
    "rank.model.vision",
    "rank.model.base",
    "rank.model.layer_offload",
    "rank.model.layers.feed_forward",
    "rank.model.layers.normed_moe",
    "rank.model.layers.moe",
    "rank.model.stored_formats.*",
    "rank.model.experts",
    "rank.model.layers",
    "rank.model.formats",
    "rank.model.weights",
    "rank.model.config",
    "rank.model.stored_formats",  # which there are: its own file alone
    "rank.model.architectures",  # which there are: its own file alone
    "rank.model.batch",
    "rank.model.cache_spec",
    "rank.model.shard",
    "comm",
    "kernels.document",
    "kernels.attention",
    "kernels.moe",
    "kernels.quantized",
    "kernels.recurrent",
    "kernels.gemm",
    "kernels.rope",
    "kernels.collective",
    "kernels.norm",
    "kernels.activation",
    "kernels.embedding",
    "kernels.cache",
    "kernels.sampling",
    "kernels.cpp",
    "kernels.candidate",
    "kernels.host_memory",
    "kernels.jit",
    "kernels.kernel_cache",
    "kernels.device",
    "kernels.segmented_graph",
    "rank.options",
    "rank.flags",
    "rank.sampling_fields",
    "rank.nvml",
    "rank.fork_server",
    "rank.framed_socket",
    "rank.protocol",
    "rank.checkpoint_files",
    "rank.gguf",
    "rank.vision",
    "rank.safetensors_header",
    "rank.untrusted_files",
    "rank.json_decoding",
    "rank.filesystems",
    "rank.heap",
    "rank.layer_slots",
    "rank.cache_groups",
    "child_python",
    "linux_calls",
    "logs",
    "errors",
)
LOOSE = ("errors", "child_python", "linux_calls", "logs")  # modules beside the rooms
# Rooms that must not be imported although they stand further down.
APART = {
    "rank.__main__": ("rank.convert",),
    "rank.scheduler": ("rank.convert",),
    "rank.worker": ("rank.convert",),
    "rank.server": ("rank.convert", "rank.scheduler", "rank.worker", "rank.model", "comm", "kernels"),
    "launcher": ("rank.__main__", "rank.convert", "rank.scheduler", "rank.worker", "rank.model", "comm", "kernels"),
}


def modules():
    """Every module of the package's rooms: its name without `phalanx.`, and its file."""
    for name in LOOSE:
        yield name, ROOT / f"{name}.py"
    for room in ("launcher", "rank", "comm", "kernels"):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def imports(name: str, path: Path) -> list[tuple[str, int, bool]]:
    """The imports of a file: names of modules, lines, and whether it is relative."""
    return list(found_imports(name, path))


def found_imports(name: str, path: Path):
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, False
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno, False
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            target = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = ROOT.joinpath(*target, alias.name)
                is_module = full.is_dir() or full.with_suffix(".py").exists()
                yield ".".join([*target, alias.name] if is_module else target), node.lineno, True


def room(name: str) -> str:
    return next((one for one in ROOMS if name == one or name.startswith(one.removesuffix("*").rstrip(".") + ".")), "")


def test_a_room_imports_only_from_rooms_further_down():
    wrong = []
    for name, path in modules():
        here = room(name)
        for target, line, relative in imports(name, path):
            there = room(target) if relative else ""
            if not here or not there or here == there:
                continue
            apart = next((rooms for above, rooms in APART.items() if here.startswith(above)), ())
            if ROOMS.index(there) < ROOMS.index(here) or there.startswith(apart):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_inside_the_house_are_relative():
    rooms = {"phalanx", "comm", "kernels", "rank", "launcher", *LOOSE}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for name, path in modules()
        for target, line, relative in imports(name, path)
        if not relative and target.split(".")[0] in rooms
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_room():
    lost = [name for name, _ in modules() if not room(name) and name not in ("rank", "rank.model", "kernels")]
    assert not lost, lost


LIGHT = {
    "phalanx": ("torch", "mpi4py", "cupy", "tornado", "numpy", "msgspec"),
    "phalanx.launcher.cli": ("torch", "mpi4py", "cupy", "tornado", "numpy", "tokenizers"),
    "phalanx.launcher.commands.serve": ("torch", "mpi4py", "cupy", "tornado", "numpy", "tokenizers"),
    "phalanx.launcher.job.rank_bootstrap": ("torch", "mpi4py", "cupy", "tornado", "numpy", "tokenizers", "asyncio"),
    "phalanx.launcher.llm": ("torch", "mpi4py", "cupy", "tornado"),
    "phalanx.rank.options": ("torch", "mpi4py", "cupy", "tornado", "numpy"),
    "phalanx.rank.safetensors_header": ("torch", "mpi4py", "cupy", "tornado", "numpy", "safetensors"),
    "phalanx.rank.protocol": ("torch", "mpi4py", "cupy", "tornado", "numpy"),
}


def loaded(module: str) -> set[str]:
    code = f"import importlib, sys; importlib.import_module({module!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules(module):
    assert not loaded(module) & set(LIGHT[module])


def below(prefix: str) -> list[str]:
    return ["phalanx." + name for name, _ in modules() if name == prefix or name.startswith(prefix + ".")]


@pytest.mark.parametrize("prefix", ["rank.server", "rank.scheduler"])
def test_server_and_scheduler_load_no_torch(prefix):
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    names = below(prefix)
    assert len(names) > 3
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split()) & {"torch", "cupy", *(("mpi4py",) if prefix == "rank.server" else ())}
    assert not found


def test_no_room_under_its_bare_name():
    """`comm`, `kernels` and `rank` are other people's names: Jupyter's, Hugging Face's."""
    names = [name for name in below("rank") + below("comm") + below("launcher") if not name.endswith("__main__")]
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*({'comm', 'kernels', 'rank', 'launcher'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n"
