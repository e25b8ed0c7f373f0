"""The declared candidates, and the page that is made of them."""

from phalanx.kernels import candidate, document, jit
from phalanx.kernels.candidate import Candidate


def test_the_page_is_what_is_declared():
    assert document.PAGE.read_text() == document.page(), "run python -m phalanx.kernels.document"


def test_the_first_that_supports_is_chosen():
    one, other = (Candidate(name, "", "", lambda x, name=name: x >= name, print) for name in ("b", "a"))
    assert candidate.choose([one, other], "c") is one
    assert candidate.choose([one, other], "a") is other
    assert candidate.choose([one, other], "") is None


def test_a_module_is_imported_when_it_is_asked(monkeypatch, tmp_path):
    (tmp_path / "kernel_of_a_test.py").write_text("def supports(x): return x > 1\ndef run(x): return x + 1\n")
    one = candidate.imported_late("kernel_of_a_test", "GPUs", "all else")
    assert one[:3] == ("kernel_of_a_test.py", "GPUs", "all else")
    monkeypatch.syspath_prepend(tmp_path)
    assert candidate.choose([one], 2) is one and not one.supports(1) and one.run(2) == 3


def test_sources_are_there_and_the_last_one_takes_the_rest():
    for family in document.FAMILIES.values():
        for one in family:
            assert not one.name.endswith(".cu") or one.name in jit.SOURCES
        assert "all else" in family[-1].takes
    sources = {path.name for path in document.PAGE.parents[1].glob("kernels/*/*")}
    assert {name for kinds in document.SINGLE.values() for names in kinds for name in names} <= sources
