"""docs/options.md and docs/api.md say what the code has."""

from pathlib import Path

import msgspec
import phalanx
import pytest
from phalanx.launcher import document
from phalanx.launcher.cli import verbs
from phalanx.rank.server.field_meanings import MEANINGS, meaning
from phalanx.rank.server.http.routes import paths, routes

ROOT = Path(phalanx.__file__).resolve().parent


@pytest.mark.parametrize("name", document.PAGES)
def test_the_page_is_what_the_code_gives(name):
    written = (document.DOCS / name).read_text(encoding="utf-8")
    assert written == document.PAGES[name](), f"docs/{name} is out of date; write it anew: {document.COMMAND}"


def test_every_verb_and_flag_is_there():
    page = document.options_page()
    assert set(document.STRUCTS) == set(verbs())
    assert "| `--port`, `--p` N | `PHALANX_PORT` | whole number, 0 to 65535 | `2000` |" in page
    assert "| `--port`, `--p` N |" in page and "`--tensor-parallel-size`, `-tp`, `--tp-size` N |" in page
    assert "| `--hf-token`, `--hf-token-path`, `-hft` | refused | set HF_TOKEN" in page
    assert "| `--max-logprobs` | refused, but for `0` to `20` |" in page
    assert "| `--jinja` | has no effect |" in page and "| `--nnodes`, `--num-nodes` | refused, but for `1` |" in page


def test_other_variables_are_those_that_the_code_knows():
    known = "".join(
        path.read_text() for room in ("launcher", "rank", "kernels") for path in (ROOT / room).rglob("*.py")
    )
    known = known.replace((ROOT / "launcher/document.py").read_text(), "")
    assert not [name for name in document.VARIABLES if name not in known]


def test_every_endpoint_and_field_is_there():
    page = document.api_page()
    assert all(f"`{path}`" in page for path in paths())
    assert "| `messages` | text or list of objects |  | **needed** |" in page
    assert "| `temperature` | number | 0 to 100 | `1.0` |" in page
    assert "`phalanx_requests_running` | gauge" in page


def test_meanings_are_of_fields_that_exist():
    kinds = {route.schema for route in routes() if route.schema}
    fields = {(kind, field.name) for kind in kinds for field in msgspec.structs.fields(kind)}
    known = {name for kind, name in fields} | {f"{kind.__name__}.{name}" for kind, name in fields}
    assert all(meaning(*field) for field in fields), "rank/server/field_meanings.py says what each field means"
    assert set(MEANINGS) <= known


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
    assert document._type(kind) == words
