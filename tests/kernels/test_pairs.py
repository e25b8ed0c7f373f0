"""Who looks for what launches a kernel, for its sizes or its reference, finds it by the kernel's name."""

from pathlib import Path

from phalanx import kernels

ROOT = Path(kernels.__file__).parent
# Sources that no Python file of their name loads, and why.
UNPAIRED = {"cpp/pool.cpp": "runs the operations of all others, and is none"}


def paired(source: Path) -> bool:
    beside = source.with_suffix(".py")
    return beside.exists() and f'"{source.stem}"' in beside.read_text()


def test_every_source_is_loaded_by_a_python_file_of_its_name():
    sources = [*ROOT.glob("*/*.cu"), *ROOT.glob("*/*.cpp")]
    assert len(sources) > 60
    assert {str(one.relative_to(ROOT)) for one in sources if not paired(one)} == set(UNPAIRED)
