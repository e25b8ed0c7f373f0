"""Chat templates: Jinja sources of the model's authors, rendered in a sandbox with the conventions they rely on."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from ..api_error import ApiError
from .control import MARK
from .family_templates import FamilyTemplate, family_template

# Marks where the final message ends, so that what the template writes after it can be cut off.
CUT = "\u2063phalanx-cut\u2063"
LONGEST = 10.0  # seconds to render a prompt
LOOK = 1 << 16  # characters between two looks at how long a prompt has become
ESCAPE = re.compile(r"\\(?:u[0-9a-f]{4}|.)")
MARK_ESCAPED = json.dumps(MARK)[1:-1]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.If(jinja2.nodes.Const(True), body, [], [], lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML; models were trained without that.
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii and MARK_ESCAPED in text:  # a mark stays a mark
        text = ESCAPE.sub(lambda found: MARK if found[0] == MARK_ESCAPED else found[0], text)
    return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with an end of the time: `start`, in each thread that renders.

    It looks at the clock where a template calls something or reads an attribute, as loops do; jinja2 bounds a range.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._clock = threading.local()

    def start(self) -> None:
        self._clock.end = time.monotonic() + LONGEST

    def look(self) -> None:
        if time.monotonic() > self._clock.end:
            raise jinja2.TemplateError(f"rendering takes longer than {LONGEST:g} s")

    def call(self, *args: Any, **options: Any) -> Any:
        self.look()
        return super().call(*args, **options)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.look()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.look()
        return super().getitem(obj, argument)


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return env


class ChatTemplate:
    """The model's template, or several by name: "default", and "tool_use" for requests with tools."""

    def __init__(self, sources: dict[str, str], tokens: dict[str, str], family: FamilyTemplate | None = None):
        """`tokens` are bos_token, eos_token and their like, which templates name. family: whose template it is, where
        the model has none of its own."""
        self.source = "\n".join(sources.values())
        self.family = family
        self._tokens = tokens
        self._sandbox = env = _environment()
        self._templates = {name: env.from_string(source) for name, source in sources.items()}

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.source

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        generate: bool = True,
        continue_final: bool = False,
        variables: dict[str, Any] | None = None,
        check: Callable[[str], None] | None = None,
    ) -> str:
        """The prompt. `generate` opens the assistant's turn; `continue_final` leaves the last message open instead.

        `check` is called with parts of the prompt as they are written, and raises ApiError when that is enough.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()))
        if continue_final:
            final = messages[-1]
            messages = [*messages[:-1], {**final, "content": (final.get("content") or "") + CUT}]
        self._sandbox.start()
        try:
            parts = template.generate(
                {
                    **self._tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": generate,
                }
            )
            # What a continued message's template writes behind it is cut off again, so its length says nothing.
            text = "".join(parts if check is None or continue_final else _checked(parts, check))
        except ApiError:
            raise
        except jinja2.TemplateError as error:
            raise ApiError(
                400, f"the model's chat template refuses these messages: {_unmarked(error)}", "messages"
            ) from None
        except Exception as error:  # a type that the template did not expect
            raise ApiError(
                400,
                f"the model's chat template fails on these messages: {type(error).__name__}: {_unmarked(error)}",
                "messages",
            ) from None
        if continue_final:
            text, found, _ = text.rpartition(CUT)
            if not found:
                raise ApiError(
                    400,
                    "continue_final_message: the model's chat template does not write the last "
                    "message's content as it is",
                    "continue_final_message",
                )
        return text


def _checked(parts: Iterable[str], check: Callable[[str], None]) -> Iterator[str]:
    kept: list[str] = []
    size = 0
    for part in parts:
        kept.append(part)
        size += len(part)
        if size >= LOOK:
            text = "".join(kept)
            check(text)
            yield text
            kept, size = [], 0
    yield from kept


def _unmarked(error: Exception) -> str:
    return str(error).replace(MARK, "")


def _token_texts(config: dict) -> dict[str, str]:
    texts = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        texts[name] = (value.get("content") if isinstance(value, dict) else value) or ""
    return texts


def load_template(model_dir: Path, tokenizer_config: dict, override: str = "") -> ChatTemplate | None:
    """The template of a model directory, or its family's where it has none; None where the family is unknown.

    Raises ValueError where it is damaged.
    """
    sources: dict[str, str] = {}
    inline = tokenizer_config.get("chat_template")
    if override:
        sources["default"] = Path(override).read_text(encoding="utf-8")
    elif (file := model_dir / "chat_template.jinja").is_file():
        sources["default"] = file.read_text(encoding="utf-8")
        for extra in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = extra.read_text(encoding="utf-8")
    elif (file := model_dir / "chat_template.json").is_file():
        sources["default"] = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    elif isinstance(inline, str):
        sources["default"] = inline
    elif inline:
        sources = {entry["name"]: entry["template"] for entry in inline}
    family = None if sources else family_template(model_dir)
    if family is not None:
        sources["default"] = family.source
    try:
        return ChatTemplate(sources, _token_texts(tokenizer_config), family) if sources else None
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of {override or model_dir} is no valid Jinja: {error.message}, line {error.lineno}"
        ) from None
