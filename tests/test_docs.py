"""What the documents name is there: files, headings, model types, tool-call formats; and their lines are short."""

import re
from pathlib import Path

import phalanx
import pytest
from phalanx.rank.gguf import architectures as gguf
from phalanx.rank.model import architectures
from phalanx.rank.server.text import tool_formats

ROOT = Path(phalanx.__file__).resolve().parent
ROOMS = "launcher|rank|comm|kernels|benchmarks|tests|docs|hostfiles"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
# Other people's, users' own, and what a page says will be made.
ELSEWHERE = {"bench_vllm.py", "llama.cpp", "answers.jsonl", "requests.jsonl"}
SOURCES = re.compile(r"(?<![\w./*<>-])[\w-]+\.(?:py|cu|cuh|cpp|jsonl)\b")  # a source's bare name
PATHS = re.compile(rf"(?<![\w./-])(?:{ROOMS})/[\w./*-]*[\w*](?!\w*<)")
LINKS = re.compile(r"\]\((?!https?:)([^)#]+)")
ANCHORS = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
LINE = 120  # characters, but of tables, of what a program has written, and of pages that are generated
GENERATED = {"options.md", "api.md"}


def names() -> set[str]:
    return {path.name for room in ROOMS.split("|") for path in (ROOT / room).rglob("*") if path.is_file()} | {
        path.name for path in ROOT.iterdir()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    gone = [path for path in PATHS.findall(text) if not list(ROOT.glob(path)) and not list(ROOT.glob(path + ".*"))]
    gone = [path for path in gone if path not in ELSEWHERE]
    gone += [link for link in LINKS.findall(text) if not (page.parent / link).exists()]
    gone += sorted(set(SOURCES.findall(text)) - names() - ELSEWHERE)
    assert not gone, f"{page.name} names files that are not there"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_are_linked_to(page):
    for link, anchor in ANCHORS.findall(page.read_text(encoding="utf-8").replace("\n", " ")):
        assert anchor in anchors(page.parent / link if link else page), f"{link}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_lines(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert not [line for line in text.splitlines() if len(line) > LINE and not line.startswith("|")]


def occurs(block: str, sources: list[str]) -> bool:
    """Whether the lines are a source's, however indented, one after the other. `…` stands for more: of a line, or of
    several where it is alone; then what is before it and after it occurs in one source."""
    parts = [part.strip().split("\n") for part in re.split(r"^\s*…$", block, flags=re.M) if part.strip()]
    patterns = [[".*".join(re.escape(one.strip()) for one in line.split("…")) for line in part] for part in parts]
    patterns = [re.compile("\n".join(rf"[ \t]*{line}" for line in part) + "$", re.M) for part in patterns]
    return any(all(pattern.search(text) for pattern in patterns) for text in sources)


def test_code_of_the_tree_is_quoted_as_it_stands():
    """docs/extending.md says by examples how the tree is extended."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|cpp)\n(.*?)^```", text, flags=re.M | re.S)
    kinds = {"python": "*.py", "cpp": "*.cpp"}
    rooms = [ROOT / room for room in ROOMS.split("|")]
    sources = {kind: [path.read_text() for room in rooms for path in room.rglob(kinds[kind])] for kind in kinds}
    assert len(blocks) > 5
    wrong = [one for kind, block in blocks for one in re.split(r"\n\n+(?=\S)", block) if not occurs(one, sources[kind])]
    assert not wrong, "stands otherwise in the tree, or is gone"


def cells(page: str, heading: str, column: int = 1) -> list[str]:
    """A column of the page's table that begins with this heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[column].strip() for row in rows]


def test_readme_lists_the_models_that_there_are():
    assert cells("README.md", "model_type") == [f"`{name}`" for name in architectures.supported()]


def test_formats_lists_the_architectures_of_gguf_files_that_there_are():
    page, heading = "docs/formats.md", "name | models | written from"
    names, written = ([name for cell in cells(page, heading, column) for name in quoted(cell)] for column in (1, 3))
    assert sorted(map(gguf.spelled, names)) == list(gguf.supported())
    assert sorted(written) == gguf.written()
    unserved = (ROOT / page).read_text(encoding="utf-8").partition("- **Not served**")[2].partition("\n\n")[0]
    assert quoted(unserved) and not set(map(gguf.spelled, quoted(unserved))) & set(gguf.supported())


def quoted(text: str) -> list[str]:
    return re.findall("`(.+?)`", text)


def test_readme_lists_the_tool_call_formats_that_there_are():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = text.partition("tool calls in the formats ")[2].partition("|")[0].strip()
    assert listed == ", ".join(f"`{name}`" for name in tool_formats.names())
