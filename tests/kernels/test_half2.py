"""Who looks for what launches a kernel, for its sizes or its reference, finds it in the kernel's folder."""

from pathlib import Path

from phalanx import kernels

ROOT = Path(kernels.__file__).parent


def test_every_source_is_loaded_by_a_python_file_of_its_folder():
    sources = [*ROOT.glob("*/*.cu"), *ROOT.glob("*/*.cpp")]
    assert len(sources) > 60
    texts = {source.parent: "".join(one.read_text() for one in source.parent.glob("*.py")) for source in sources}
    assert not [source for source in sources if f'"{source.stem}"' not in texts[source.parent]]
