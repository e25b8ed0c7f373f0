"""docs/options.md and docs/api.md say what the code has."""

import re
from pathlib import Path

import msgspec
import phalanx
import pytest
from phalanx.launcher import document
from phalanx.launcher.cli import verbs
from phalanx.rank.server.fields import properties
from phalanx.rank.server.http.routes import paths, routes

ROOT = Path(phalanx.__file__).resolve().parent


@pytest.mark.parametrize("name", document.PAGES)
def test_the_page_is_what_the_code_gives(name):
    written = (document.DOCS / name).read_text(encoding="utf-8")
    assert written == document.PAGES[name](), f"old: {document.COMMAND}"


def test_every_verb_and_flag_is_there():
    page = document.options_page()
    assert set(document.STRUCTS) == set(verbs())
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    row = {cells[0]: cells[1:] for cells in reversed(rows)}  # a flag's first row is that of its verb
    assert row["`--port`, `--p` N"][0] == "`PHALANX_PORT`" and "65535" in row["`--port`, `--p` N"][1]
    assert any("`-tp`, `--tp-size` N" in flags for flags in row)
    assert row["`--hf-token`, `--hf-token-path`, `-hft`"][0] == "rejected" and row["`--jinja`"][0] == "has no effect"
    assert "`0` to `20`" in row["`--max-logprobs`"][0] and "`1`" in row["`--nnodes`, `--num-nodes`, `--nodes`"][0]


def test_other_variables_are_those_that_the_code_knows():
    known = "".join(
        path.read_text() for room in ("launcher", "rank", "kernels") for path in (ROOT / room).rglob("*.py")
    )
    known = known.replace((ROOT / "launcher/document.py").read_text(), "")
    assert not [name for name in document.VARIABLES if name not in known]


def test_every_endpoint_and_field_is_there():
    page = document.api_page()
    assert all(f"`{path}`" in page for path in paths())
    assert re.search(r"`messages` .*\*\*needed\*\*", page)
    assert re.search(r"`temperature` .* number .*100 ", page)
    assert "`phalanx_requests_running` | gauge" in page


def test_every_field_has_a_meaning():
    kinds = {route.schema for route in routes() if route.schema}
    assert all(field["description"] for kind in kinds for field in properties(kind).values())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (str | None, "text"),
        (list[int] | None, "list of integers"),
        (str | list[str | int | list[int]], "text or list of (text or integer or list of integers)"),
        (dict[str, float] | None, "object"),
    ],
)
def test_types_are_named_as_in_json(kind, words):
    assert document._type(msgspec.json.schema(kind)) == words
