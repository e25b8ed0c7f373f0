"""The grammar of a whole answer: thoughts, then text, tool calls or what the request wants it to be."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from .api_error import bad
from .constraint import Constraint, checked, json_schema
from .decoding import show
from .text.argument_schema import Unwritable
from .text.lark import Lark, without
from .text.load import ModelText
from .text.reasoning import ReasoningFormat
from .text.tool_formats import CallableTool, ToolCallFormat
from .text.unmarked_call import unmarked_calls, without_unmarked_calls

LARGEST_TOOLS = 1 << 20  # bytes of their schemas together; llguidance checks about 400 KB a second
LARGEST_ANSWER = 1 << 22  # bytes of the whole grammar
NAME = re.compile(r"[\w.-]{1,128}")  # of functions: what the parsers of all formats read
NEWLINES = r"/\n{0,3}/"  # between thoughts and answer


class Calls(NamedTuple):
    """The tools that an answer may call."""

    tools: list[dict[str, Any]]  # as OpenAI has them
    required: bool  # the answer is calls and nothing else
    parallel: bool  # it may be several

    @property
    def strict(self) -> bool:
        return any(tool["function"].get("strict") for tool in self.tools)


class Thoughts(NamedTuple):
    """The place of thoughts in the text that the model writes."""

    format: ReasoningFormat
    begun: bool  # the prompt has opened them; otherwise they may come or not


def answer_grammar(
    text: ModelText, constraint: Constraint | None, calls: Calls | None, thoughts: Thoughts | None
) -> str:
    """For rank 0; "" where everything is allowed. Raises ApiError 400 for what cannot be enforced."""
    wanted = checked(constraint) if constraint is not None else None
    if calls is not None and text.tool_format is None and (calls.required or constraint is not None):
        raise bad(
            "tool_choice" if calls.required else "tools",
            "this server reads no calls of this model (--tool-call-parser none)"
            + (', use tool_choice "auto"' if calls.required else ": leave the tools or the output's format out"),
        )
    if calls is not None and not (calls.required or calls.strict or constraint is not None):
        calls = None
    if text.tool_format is None:
        calls = None
    if calls is None and constraint is None:
        return ""
    form = text.reasoning
    if calls is None and thoughts is None and (form is None or not form.dropped):
        return plain_grammar(constraint)
    lark = Lark(text.tokenizer.added)
    answers = [] if wanted is None else [_marked(lark, form, lark.part(wanted))]
    if calls is not None:
        assert text.tool_format is not None
        free = constraint is None and not calls.required
        answers += _answers_with_calls(lark, calls, text.tool_format, form, free)
    # A call in thoughts counts if nothing follows them (text/draft.py), and an answer in text may be nothing.
    drafts = text.tool_format.opens if calls is not None and not calls.required and text.tool_format else ()
    written = lark.grammar(f"{_before(lark, thoughts, drafts)} ({' | '.join(answers)})")
    if len(written) > LARGEST_ANSWER:
        raise bad("tools", f"tools: their grammar has {len(written)} bytes, at most {LARGEST_ANSWER}: offer fewer")
    return written


def plain_grammar(constraint: Constraint | None) -> str:
    """The grammar of a text that is shown as it comes."""
    return "" if constraint is None else json.dumps({"grammars": [checked(constraint)]})


def _before(lark: Lark, thoughts: Thoughts | None, without: tuple[str, ...]) -> str:
    """The thoughts, which have none of these markers in them, and what stands between them and the answer."""
    if thoughts is None:
        return '""'
    form, begun = thoughts
    rest = f"{lark.until(form.closes, without)} {lark.marker(form.joint) if form.joint else NEWLINES}"
    return rest if begun else f"(({' | '.join(map(lark.marker, form.opens))}) {rest})?"


def _marked(lark: Lark, form: ReasoningFormat | None, answer: str) -> str:
    """An answer with the markers that a model writes around it."""
    if form is None or not form.dropped:
        return answer
    before, behind = form.around
    return f"{lark.marker(before)} {answer}{f' {lark.marker(behind)}' if behind else ''}"


def _answers_with_calls(
    lark: Lark, calls: Calls, form: ToolCallFormat, reasoning: ReasoningFormat | None, free: bool
) -> list[str]:
    """The alternatives that are calls; `free`: and those in which text stands before them or alone."""
    tools = _callable(lark, calls.tools)
    known = [marker for marker in form.opens if marker in lark.added]
    begins = ["", *(form.opens if free else known)] if form.bare else [*known, *form.opens][:1]
    before = _pieces(lark, form, reasoning) if free else ""
    text = _text(form, reasoning, tools)
    found = []
    for marker in begins:
        try:
            written = form.grammar(lark, tools, calls.parallel, marker)
        except Unwritable as error:
            raise bad("tools", f"tools: a schema of parameters cannot be enforced: {error}") from None
        if free and marker:
            found.append(f"{before} {lark.ended(text, marker)} {written}")
        else:
            found.append(f"{lark.marker(marker) if marker else ''} {written}")
    if free:
        found.append(f"{before} {lark.define(lark.name('TEXT'), text)}")
        if form.unmarked:
            found.append(unmarked_calls(lark, tools))
    return found


def _text(form: ToolCallFormat, reasoning: ReasoningFormat | None, tools: list[CallableTool]) -> str:
    """The terminal of a text without markers, which begins no call."""
    markers = (*form.opens, *(reasoning.dropped if reasoning is not None else ()))
    begins = rf"([^\s{re.escape(form.bare)}](?s:.*))?" if form.bare else "(?s:.*)"
    no_call = f" & {without_unmarked_calls(tools)}" if form.unmarked else ""
    return f"/{begins}/ & {without(markers)}{no_call}"


def _pieces(lark: Lark, form: ToolCallFormat, reasoning: ReasoningFormat | None) -> str:
    """Rules for what may come before the last text: texts up to markers that are not shown, and thoughts again."""
    if reasoning is None or not reasoning.dropped:
        return ""
    shown = lark.until(reasoning.dropped, form.opens)
    thoughts = f"{lark.until(reasoning.opens, (*form.opens, *reasoning.dropped))} {lark.until(reasoning.closes)}"
    return f"({shown} | {thoughts})*"


def _callable(lark: Lark, tools: list[dict[str, Any]]) -> list[CallableTool]:
    found = []
    size = sum(len(json.dumps(tool["function"].get("parameters"))) for tool in tools)
    if size > LARGEST_TOOLS:
        raise bad("tools", f"tools: schemas of {size} bytes are to be enforced, at most {LARGEST_TOOLS}: offer fewer")
    for tool in tools:
        function = tool["function"]
        if not NAME.fullmatch(function["name"]):
            shown = show(function["name"])
            raise bad("tools", f"tools: calls of {shown} cannot be enforced: name it in letters, digits, _, - and .")
        # One without parameters takes none, as OpenAI has it.
        schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
        strict = bool(function.get("strict"))
        part = checked(json_schema(f"tools: parameters of {function['name']}", schema, strict))
        found.append(CallableTool(lark, function["name"], part, strict))
    return found
