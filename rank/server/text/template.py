"""Chat templates: Jinja sources of the model's authors, rendered in a sandbox with the conventions they rely on.

The sandbox keeps Python's objects from them. Nothing here bounds their time and memory: a server has templates parsed
and rendered in a process with limits (text_process.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from ... import untrusted_files
from ..api_error import ApiError
from .control import MARK
from .family_templates import FamilyTemplate, family_template
from .model_files import read_json

# Marks where the final message ends, so that what the template writes after it can be cut off.
CUT = "\u2063phalanx-cut\u2063"
LONGEST_ERROR = 1000  # characters of a template's own words that an error repeats
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


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
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
        env = _environment()
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
            messages = [*messages[:-1], _with_cut(messages[-1])]
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
            # The template's text behind a continued message is cut off again, so its length does not matter.
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


def _with_cut(message: dict[str, Any]) -> dict[str, Any]:
    """The message with CUT behind its content, which is a text or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + CUT}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + CUT}]}


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
    return str(error)[:LONGEST_ERROR].replace(MARK, "")


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
    elif (model_dir / "chat_template.jinja").is_file():
        sources["default"] = untrusted_files.read_text(model_dir, "chat_template.jinja")
        for extra in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = untrusted_files.read_text(model_dir, f"additional_chat_templates/{extra.name}")
    elif named := read_json(model_dir, "chat_template.json"):
        sources["default"] = named["chat_template"]
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
