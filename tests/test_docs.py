"""Things that the documents name exist: files, headings, model types, tool-call formats; and their lines are short."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized.ggml import CODECS
from phalanx.launcher import builtin_model, document
from phalanx.launcher.job import sbatch
from phalanx.launcher.options import models_file, option_sources
from phalanx.launcher.options.compat_flags import OTHER_NAMES, find
from phalanx.rank import flags
from phalanx.rank.gguf import architectures as gguf
from phalanx.rank.options import Options
from phalanx.rank.server.mcp import config as mcp_config
from phalanx.rank.server.text import reasoning, tool_formats

from .documents import BENCHMARKS, PAGES, ROOT, USERS, blocks, commands, page_id

ROOMS = "launcher|rank|comm|kernels|benchmarks|tests|docs|hostfiles"
# Other people's, users' own, and what a page says will be made.
ELSEWHERE = {"llama.cpp", "answers.jsonl", "requests.jsonl"}
SOURCES = re.compile(r"(?<![\w./*<>-])[\w-]+\.(?:py|cu|cuh|cpp|jsonl)\b")  # a source's bare name
PATHS = re.compile(rf"(?<![\w./-])(?:{ROOMS})/[\w./*-]*[\w*](?!\w*<)")
LINKS = re.compile(r"\]\((?!https?:)([^)#]+)")
ANCHORS = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
LINE = 120  # characters, but of tables, of what a program has written, and of pages that are generated
# Flags of mpirun, srun, sbatch and apptainer, and what a page calls any flag.
OTHERS = {
    "--allow-run-as-root",
    "--bind-to",
    "--map-by",
    "--mca",
    "--export",
    "--gpu-bind",
    "--gpus-per-task",
    "--wait",
}
OTHERS |= {"--ntasks-per-node", "--gpus-per-node", "--nv", "--bind", "--flag", "--no-flag"}
PLACEHOLDERS = {"N": "1", "GB": "1", "FORMAT": "q4km"}
GENERATED = {"options.md", "api.md"}


def names() -> set[str]:
    return {path.name for room in ROOMS.split("|") for path in (ROOT / room).rglob("*") if path.is_file()} | {
        path.name for path in ROOT.iterdir()
    }


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    broken = [link for link in LINKS.findall(text) if not (page.parent / link).exists()]
    assert not broken, page.name
    if page.parent.name == "measurements":  # a journal: its pages keep the names of their day
        return
    gone = [path for path in PATHS.findall(text) if not list(ROOT.glob(path)) and not list(ROOT.glob(path + ".*"))]
    gone = [path for path in gone if path not in ELSEWHERE]
    gone += sorted(set(SOURCES.findall(text)) - names() - ELSEWHERE)
    assert not gone, page.name


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_headings_that_are_linked_to(page):
    for link, anchor in ANCHORS.findall(page.read_text(encoding="utf-8").replace("\n", " ")):
        assert anchor in anchors(page.parent / link if link else page), f"{link}#{anchor}"


def sentences(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=page_id)
def test_lines(page):
    assert not [line for line in sentences(page).splitlines() if len(line) > LINE and not line.startswith("|")]


def occurs(block: str, sources: list[str]) -> bool:
    """Whether the lines are a source's, however indented, one after the other. `…` stands for more: of a line, or of
    several where it is alone; then what is before it and after it occurs in one source."""
    parts = [part.strip().split("\n") for part in re.split(r"^\s*…$", block, flags=re.M) if part.strip()]
    patterns = [[".*".join(re.escape(one.strip()) for one in line.split("…")) for line in part] for part in parts]
    patterns = [re.compile("\n".join(rf"[ \t]*{line}" for line in part) + "$", re.M) for part in patterns]
    return any(all(pattern.search(text) for pattern in patterns) for text in sources)


def test_code_of_the_tree_is_quoted_as_it_stands():
    """docs/extending.md says by examples how the tree is extended."""
    kinds = {"python": "*.py", "cpp": "*.cpp"}
    rooms = [ROOT / room for room in ROOMS.split("|")]
    sources = {kind: [path.read_text() for room in rooms for path in room.rglob(kinds[kind])] for kind in kinds}
    quotes = [(kind, one) for kind in kinds for block in blocks(ROOT / "docs/extending.md", kind)
              for one in re.split(r"\n\n+(?=\S)", block)]  # fmt: skip
    assert len(quotes) > 5
    assert not [one for kind, one in quotes if not occurs(one, sources[kind])]  # stands otherwise, or is gone


def cells(page: str, heading: str, column: int = 1) -> list[str]:
    """A column of the page's table that begins with this heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[column].strip() for row in rows]


def test_formats_lists_the_architectures_of_gguf_files_that_there_are():
    page, heading = "docs/formats.md", "name | models | written from"
    names, written = ([name for cell in cells(page, heading, column) for name in quoted(cell)] for column in (1, 3))
    assert sorted(map(gguf.spelled, names)) == list(gguf.supported())
    assert sorted(written) == gguf.written()
    unserved = (ROOT / page).read_text(encoding="utf-8").partition("- **Not served**")[2].partition("\n\n")[0]
    assert quoted(unserved) and not set(map(gguf.spelled, quoted(unserved))) & set(gguf.supported())


def test_formats_lists_the_types_of_gguf_files_that_stay_quantised(monkeypatch):
    monkeypatch.setattr(ops, "available", lambda: True)
    types, *bits = (cells("docs/formats.md", "type | bits in the file", column) for column in range(1, 5))
    assert sorted(types) == sorted(CODECS.keys() - {"Q8_0"})
    for name, *said in zip(types, *bits, strict=True):
        type = CODECS[name].type
        kept = (CODECS[name].kept_bits(4096, torch.device(device)) for device in ("cpu", "cuda"))
        assert [float(one) for one in said] == pytest.approx([8 * type.bytes / type.form.super, *kept], abs=0.006)


def quoted(text: str) -> list[str]:
    return re.findall("`(.+?)`", text, re.S)


def test_the_formats_of_calls_and_reasoning_that_are_named_exist():
    page = "docs/tools-and-reasoning.md"
    for column, known in ((2, tool_formats.names()), (3, reasoning.names())):
        named = {name for cell in cells(page, "models", column) for name in quoted(cell)}
        assert named and named <= set(known)


def phalanx_commands(page: Path) -> list[list[str]]:
    """The words behind `phalanx` of commands: in blocks, in sentences, of a systemd unit and of a container."""
    text = page.read_text(encoding="utf-8")
    found = [*commands(page), *(one for one in quoted(sentences(page)) if one.startswith("phalanx "))]
    found += re.findall(r"^ExecStart=.*/(phalanx .*)$", text, re.M)
    starts = [re.search(r"(?:\bphalanx| run .*phalanx\.sif) ([^>&|]*)", one) for one in found if "…" not in one]
    words = [shlex.split(one[1]) for one in starts if one] + [
        json.loads(one) for one in re.findall(r"^ *args: (\[.*\])$", text, re.M)
    ]
    return [[PLACEHOLDERS.get(word, word) for word in one] for one in words]


@pytest.mark.parametrize("page", [page for page in PAGES if phalanx_commands(page)], ids=page_id)
def test_commands_have_options_that_exist(page):
    for words in phalanx_commands(page):
        verb = words.pop(0) if words[0] in document.STRUCTS else "serve"
        words, _ = sbatch.wanted([word for word in words if word != "--help"])
        option_sources.read(document.STRUCTS[verb], words, {})


def test_flags_that_are_named_exist():
    """Flags in sentences, by themselves or behind `phalanx`."""
    known = {"--help", "--config", "--show-config", sbatch.FLAG, *sbatch.NODES, *OTHER_NAMES, *OTHERS}
    for struct in document.STRUCTS.values():
        for spec in flags.read(struct).values():
            known |= {*spec.flag.flags, *spec.flag.off, *spec.flag.short}
    for page in USERS:
        named = " ".join(one for one in quoted(sentences(page)) if one.startswith(("--", "phalanx ")))
        unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", named)) - known
        assert not [one for one in unknown if find(one) is None], page.name


def test_flags_of_benchmarks_exist():
    known = {flag for script in (ROOT / "benchmarks").rglob("*.py")
             for flag in re.findall(r'"(--[\w-]+)"', script.read_text(encoding="utf-8"))}  # fmt: skip
    for page in USERS:
        found = [one for one in (*commands(page), *quoted(sentences(page))) if re.match("(python )?benchmarks/", one)]
        assert not set(re.findall(r" (--[\w-]+)", " ".join(found))) - known, page.name


def test_examples_of_files_are_read(tmp_path):
    """models.yaml and mcp.json by those who read them, the others as YAML and JSON."""
    (models,) = blocks(ROOT / "docs/several-models.md", "yaml")
    (servers,) = blocks(ROOT / "docs/tool-servers.md", "json")
    there = f"local_path: {builtin_model.DIRECTORY}"
    (tmp_path / "models.yaml").write_text(re.sub(r"(hf_id|local_path): \S+", there, models))
    assert len(models_file.read(Options(models_config=str(tmp_path / "models.yaml"))).entries) == 2
    (tmp_path / "mcp.json").write_text(servers)
    assert len(mcp_config.read(str(tmp_path / "mcp.json"))) == 2
    for page in USERS:
        for text in blocks(page, "json"):
            json.loads(text)
        for text in blocks(page, "yaml"):
            yaml.safe_load(text)


@pytest.mark.parametrize("folder", BENCHMARKS, ids=page_id)
def test_every_benchmark_is_described(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in folder.glob("[a-z]*.py")} | {
        f"serving/{path.name}" for path in folder.glob("serving/[a-z]*.py")
    }
    assert scripts and not [name for name in scripts if f"`{name}`" not in text]


def test_results_of_benchmarks_are_those_that_documents_cite():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    results = [path.name for path in (ROOT / "benchmarks/results").iterdir()]
    assert results and not [name for name in results if name not in text]
