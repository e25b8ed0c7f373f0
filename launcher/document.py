"""`python -m phalanx.launcher.document` writes the pages of docs/ that are lists of what the code has: PAGES."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from ..rank import protocol
from ..rank.flags import ENGINE
from ..rank.options import GROUPS, SERVER_ONLY, Options, Spec, specs
from ..rank.server import api_error, unsupported
from ..rank.server.decoding import Body
from ..rank.server.fields import limits, properties
from ..rank.server.http.metrics import Metrics
from ..rank.server.http.routes import routes
from ..rank.server.sampling_params import OPENAI_DEFAULTS
from ..rank.server.schema import ChatRequest, Common, CompletionRequest
from .cli import verbs
from .commands.batch import BatchOptions
from .commands.bench.command import BenchOptions
from .commands.chat.options import ChatOptions
from .commands.convert import ConvertOptions
from .commands.doctor.command import DoctorOptions
from .commands.fit.command import FitOptions
from .commands.gateway import GatewayOptions
from .commands.hostfile import HostfileOptions
from .commands.pull import PullOptions
from .options.compat_flags import COMPAT_FLAGS, OTHER_NAMES, CompatFlag

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMMAND = "python -m phalanx.launcher.document"
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "serve": Options,
    "batch": BatchOptions,
    "chat": ChatOptions,
    "bench": BenchOptions,
    "doctor": DoctorOptions,
    "fit": FitOptions,
    "convert": ConvertOptions,
    "pull": PullOptions,
    "hostfile": HostfileOptions,
    "gateway": GatewayOptions,
}
MADE = f"<!-- Made by `{COMMAND}`: change the code, then run it again. -->"
SOURCES = """\
An option is a flag, an environment variable or a line of a YAML file (`--config FILE`, or `PHALANX_CONFIG`): `--port
2100`, `PHALANX_PORT=2100`, `port: 2100`. The command line wins over the environment, the environment over the file, the
file over the default. An empty variable is an unset one. In YAML every spelling of a flag is a key, without its dashes,
and one file may serve several verbs. `--show-config` prints every value and where it came from. A boolean takes `on` or
`off`; as a flag it needs no value. Several flags in one row mean the same. `serve` and `batch` also take `--sbatch`,
which prints a Slurm script that runs the command, with `--nodes N` on N nodes, and every verb `--help`.
"""
OTHERS = """\
Flags of vLLM, SGLang, llama.cpp and candle-vLLM that mean what an option means are other names of it, above. These are
understood besides. One that changes nothing is passed over with a note. One that would change the answer, or asks for
what there is not, is rejected with these words. `*` stands for all names that begin so; of `--flag` there is
`--no-flag` too.
"""
PER_MODEL = "A model of [models.yaml](several-models.md) may have these for itself; the others are the whole job's:"
# Read by the program or by what it is made of, and not options.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that the job sees; `--d` counts them from 0",
    "MAP_NUMA_NODE": "`0,0,1,1`: the NUMA node of each local rank, where the GPU's is not found or not wanted",
    "MPI4PY_LIBMPI": "the MPI library that Python loads",
    "CXX": "the compiler of kernels for CPUs",
    "TMPDIR": "where compiled kernels and sockets lie, on each node",
    "HF_HOME": "where models from the hub lie, by default `~/.cache/huggingface`",
    "HF_ENDPOINT": "another hub than huggingface.co",
    "HF_TOKEN": "opens private and gated models",
    "XDG_STATE_HOME": "where running servers leave the files by which `phalanx chat` finds them",
    "XDG_CACHE_HOME": "where `phalanx doctor` leaves this machine's speed for `phalanx fit`",
    "SLURM_JOB_END_TIME": "when the job ends: `phalanx batch` is done before",
}
REQUESTS = """\
Requests and answers have OpenAI's shapes, under `/v1/messages` Anthropic's. A body is JSON (`Content-Type:
application/json`) of up to 64 MiB, also as gzip (`Content-Encoding: gzip`) of which that much comes out, and at most a
hundred times what was sent. With `--api-key` or `--api-key-file` a request needs `Authorization: Bearer KEY` or
`X-Api-Key: KEY`, except where the table says no. The answer to every request has an `X-Request-Id`, the client's own
where it sent one, and the same as `request-id`. Where the client sent a `traceparent` (W3C Trace Context), the answer
has a `traceresponse` of the same trace, and so has the log ([monitoring.md](monitoring.md#logs)). A response that is
kept is there only for the key that it was asked with. `"stream": true` answers with server-sent events, which OpenAI's
completions end with `data: [DONE]`; an error after the first event is the last event. `/openapi.json` describes all
this for programs, `/docs` for people.

A field that is not listed is ignored, unless it would change the answer: then it is rejected with 400 and its name.
`null` means that a field is not given. A default is the server's, unless its options or the model's
generation_config.json say otherwise.

The server keeps no conversation unless it is asked to. With `"record_conversation": true` it remembers the exchange
under `conversation_id`: the client's own, or one that the answer and each of its chunks name. The next chat of that id
sends its new messages only; a system message among them takes the place of the earlier one. With the option
`--record-conversation` a chat that names a `conversation_id` is recorded unless it says false. Conversations are kept
in memory, for the API key that began them: the last `--conversation-store` ones, 64 MiB of them, each for 24 hours
after its last answer; where there are too many, the key that has most loses its oldest. An id of the server's
(`conv_…`) that is not kept any more is answered with 404, a client's own begins anew. An answer that breaks off leaves
the conversation as it was. While one is made, another chat of the same id is answered with 409. `POST
/v1/conversations` begins one for responses, which name it as `conversation`; chats and responses may share one.

Responses are kept in memory, too: the last `--response-store` ones, 256 MiB of them, and of the key that has most the
oldest go first. What is made in the background counts from its beginning. Each key may have its equal part of that, or
64 MiB and 16 responses where that is more; beyond it the answer is 429. One that grows beyond it fails.
"""
LIMITS = """\
## Connections

A connection is closed when the server waits 120 seconds for a client's next byte, when a head or a body (an upload
excepted, which has an hour) takes as long, and when a client takes less than 64 KiB of an answer that waits for it
within 60 seconds. A head has at most 64 KiB and 128 headers (431), its first line 16 KiB (414). A body that is rejected
is read for 30 seconds at most.

There are as many connections as `ulimit -n` allows, but for a quarter, which is kept for files and the job. Where they
are all taken, the one that has been silent longest is closed for a new one. Where all of them are being answered, new
ones get 503, except for `/health`, `/ready`, `/v1/health` and `/ping`. An address of another machine may have half of
the connections; so may a key if there are others, unless `--requests-per-key` says otherwise.
"""
METRICS = """\
## Metrics

Where requests need a key, so does `/metrics`. Prometheus sends it with

```yaml
scrape_configs:
  - job_name: phalanx
    authorization: {credentials_file: /etc/prometheus/phalanx.key}
    static_configs: [{targets: ["node7:2000"]}]
```

`/health` tells who has no key the state only: `{"status": "ready"}`. A dashboard and alert rules are in
[monitoring.md](monitoring.md).
"""
ERRORS = """\
## Errors

An error is `{"error": {"message": …, "type": …, "param": …, "code": …}}`. `message` says what is wrong, with which
value, and what to do; `param` names the field. `code` is for programs, and null for most wrong fields. 429 and 503 may
carry `Retry-After`.
"""


def options_page() -> str:
    """docs/options.md."""
    lines = ["# Options", "", MADE, "", SOURCES]
    texts = verbs()
    for verb, struct in STRUCTS.items():
        lines += [f"## phalanx {verb}", "", f"{_sentence(texts[verb])}.", ""]
        table = [spec for name, spec in specs(struct).items() if verb != "batch" or name not in specs(Options)]
        if verb == "batch":
            without = ", ".join(f"`{specs(Options)[name].flag.flags[0]}`" for name in SERVER_ONLY)
            lines += [f"These, and all options of `serve` but {without}.", ""]
        groups = list(dict.fromkeys(spec.flag.group for spec in table))
        for group in sorted(groups, key=lambda one: GROUPS.index(one) if one in GROUPS else -1):
            if len(groups) > 1:
                lines += [f"### {group}", ""]
            rows = [_option(spec) for spec in table if spec.flag.group == group]
            lines += [_table(("flag", "variable", "values", "default", "meaning"), rows), ""]
        if verb == "serve":
            own = ", ".join(f"`{name}`" for name, spec in specs().items() if ENGINE in spec.flag.scope)
            lines += ["### Of each model", "", f"{PER_MODEL} {own}.", ""]
    lines += [
        "## Other variables",
        "",
        _table(("variable", "meaning"), ((f"`{name}`", text) for name, text in VARIABLES.items())),
        "",
    ]
    lines += [
        "## Flags of other servers",
        "",
        OTHERS,
        _table(("flag", "", "why"), _compat_rows()),
    ]
    return "\n".join(lines) + "\n"


def _compat_rows() -> Iterable[tuple[str, str, str]]:
    """A row for the flags that are answered in the same words."""
    rows: dict[CompatFlag, list[str]] = {}
    for name, entry in COMPAT_FLAGS.items():
        rows.setdefault(msgspec.structs.replace(entry, takes=""), []).append(f"`{name}`")
    for entry, names in rows.items():
        values = [f"`{value}`" for value in entry.harmless]
        # So many are whole numbers, one after the other.
        but = " or ".join(values) if len(values) < 10 else f"{values[0]} to {values[-1]}"
        what = "rejected" + (f", but for {but}" if but else "") if entry.refused else "has no effect"
        yield ", ".join(names), what, entry.text


def _option(spec: Spec) -> tuple[str, ...]:
    flag = spec.flag
    flags = [*flag.off, *flag.flags] if spec.type is bool and spec.default is True else [*flag.flags, *flag.off]
    flags += [other for other, own in OTHER_NAMES.items() if own in flags]
    shown = ", ".join(f"`{one}`" for one in flags) + (f" {flag.metavar}" if flag.metavar else "")
    shown += "".join(f"; `{one}` for `{choice}`" for one, choice in flag.short.items())
    if flag.positional:
        shown += f", or {flag.metavar} alone"
    meaning = flag.help
    if spec.type is bool and spec.default is True:
        meaning = f"`{flag.off[0]}`: {meaning}"
    return shown, f"`{spec.env}`", _values(spec), _default(spec), meaning


def _values(spec: Spec) -> str:
    if spec.flag.choices:
        return ", ".join(f"`{one}`" for one in spec.flag.choices)
    if spec.type is bool:
        return "on, off"
    kind = {int: "whole number", float: "number", tuple: "list"}.get(spec.type, "text")
    if spec.type is tuple:
        return kind
    low, high = spec.flag.low, spec.flag.high
    if low is not None and high is not None:
        return f"{kind}, {low:g} to {str(high).removesuffix('.0')}"
    return kind if low is None else f"{kind} from {low:g}"


def _default(spec: Spec) -> str:
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    if spec.default in (None, "", ()):
        return ""
    return f"`{spec.default:g}`" if isinstance(spec.default, float) else f"`{spec.default}`"


def api_page() -> str:
    """docs/api.md."""
    rows = []
    for route in routes():
        paths = ", ".join(f"`{path}`" for path in (route.path, *route.also))
        batch = "yes" if route.batchable else ""
        rows.append((route.method, paths, route.about, "yes" if route.needs_key else "no", batch))
    lines = ["# HTTP endpoints", "", MADE, "", REQUESTS]
    lines += [_table(("method", "path", "answer", "needs a key", "in `phalanx batch`"), rows), ""]
    lines += ["## Fields of chat completions and completions", "", *_request(Common, (), both := _shared())]
    kinds: dict[type[Body], str] = {}
    for route in routes():
        if route.schema:
            kinds.setdefault(route.schema, route.path)
    for kind, path in kinds.items():
        name = path.removeprefix("/v1").strip("/").replace("/", " ").capitalize()
        left_out = Common.__struct_fields__ if issubclass(kind, Common) else ()
        refused = {name: one for name, one in kind.refused.items() if not left_out or both.get(name) != one}
        lines += [f"## {name}", "", *_request(kind, left_out, refused)]
    errors = ((str(status), f"`{name}`") for status, name in api_error.TYPES.items())
    codes = ((f"`{code}`", meaning) for code, meaning in api_error.CODES.items())
    lines += [
        ERRORS,
        _table(("status", "type"), errors),
        "",
        "Other statuses from 500 on are `server_error`, other ones below `invalid_request_error`.",
        "",
        _table(("code", "meaning"), codes),
        "",
        LIMITS,
        METRICS,
        _table(("name", "kind", "meaning"), _metrics()),
    ]
    return "\n".join(lines) + "\n"


def _shared() -> dict[str, unsupported.Field]:
    """Fields that chat completions and completions both reject."""
    other = CompletionRequest.refused
    return {name: one for name, one in ChatRequest.refused.items() if other.get(name) == one}


def _request(
    kind: type[msgspec.Struct], without: Sequence[str], refused: dict[str, unsupported.Field]
) -> Iterable[str]:
    """The lines about one kind of request."""
    rows = []
    for field in msgspec.structs.fields(kind):
        if field.name in without:
            continue
        default = OPENAI_DEFAULTS.get(field.name)
        shown = "**needed**" if field.required else f"`{default}`" if default is not None else ""
        schema = properties(kind)[field.name]
        rows.append((f"`{field.name}`", _type(schema), limits(kind, field.name), shown, schema["description"]))
    yield from (_table(("field", "type", "values", "default", "meaning"), rows), "")
    reasons: dict[str, list[str]] = {}
    for name, one in refused.items():
        reasons.setdefault(one.why, []).append(f"`{name}`")
    if not reasons:
        return
    yield from ("Refused, unless the value changes nothing:", "")
    yield from (_table(("field", "why"), ((", ".join(names), why) for why, names in reasons.items())), "")


def _type(schema: dict[str, Any]) -> str:
    """The type that a JSON schema describes."""
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if schema.get("type") == "array":
        item = _type(schema["items"])
        return f"list of ({item})" if " or " in item else f"list of {item}s"
    kind = schema.get("type", "object" if "$ref" in schema else "string" if "enum" in schema else "any")
    return "text" if kind == "string" else kind


def _metrics() -> Iterable[tuple[str, str, str]]:
    """From the page that a server without an engine would show."""
    stand_in: Any = SimpleNamespace(stats=protocol.Stats(), ready=None, state="", open_sequences=0)
    page = Metrics(stand_in, "").text().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    for name, text in re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE):
        if not name.endswith("_created"):
            yield f"`{name}`", kinds[name], text


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines: list[list[str]] = [
        heads,
        ["---"] * len(heads),
        *([cell.replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


MODELS = """\
A model is a Hugging Face directory (config.json, safetensors, and tokenizer.json, tekken.json or tokenizer.model), a
hub id such as Qwen/Qwen3-0.6B, or a GGUF file. The `model_type` of its config.json decides whether it is served; GGUF's
architectures are in [formats.md](formats.md#gguf-files). Of models with vision the text model is served, and images
where [vision.md](vision.md) names the type. Which models' layers for multi-token prediction (MTP) are read, and what
drafts tokens for the others, is in [speculation.md](speculation.md#what-to-set-for-which-model).

Not served are `qwen4_exp`, whose layers look up hashes of token ids in tables of n-grams, `kimi_k3`, whose sublayers
attend to the outputs of blocks of layers before them and whose experts have an activation that no kernel here has, and
`bitnet`, whose layers read activations in 8 bits.
"""
CALLS = """\
The model's chat template shows which format it writes; `--tool-call-parser NAME` and `--reasoning-parser NAME` choose
another. [tools-and-reasoning.md](tools-and-reasoning.md) has examples.
"""


def models_page() -> str:
    def rows(package: str) -> list[Sequence[str]]:
        """The modules of a package with their docstrings' first paragraphs. They are not imported: some need torch."""
        files = sorted((ROOT / package).glob("[a-z]*.py"))
        notes = [
            (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0] for file in files
        ]
        return [
            (f"`{file.stem}`", " ".join(note.split()).replace("<", "\\<"))
            for file, note in zip(files, notes, strict=True)
        ]

    text = "rank/server/text"
    return "\n".join(
        [
            "# Models\n",
            MADE + "\n",
            MODELS,
            _table(("model_type", "what it is"), rows("rank/model/architectures")),
            "\n## Tool calls and reasoning\n",
            CALLS,
            _table(("--tool-call-parser", "what a call looks like"), rows(f"{text}/tool_formats")),
            "",
            _table(("--reasoning-parser", "what thoughts look like"), rows(f"{text}/reasoning")),
            "",
        ]
    )


PAGES = {"options.md": options_page, "api.md": api_page, "models.md": models_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(DOCS / name)
