"""The grammar of a whole answer: thoughts, then text, tool calls or what the request wants it to be."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from .api_error import bad
from .constraint import Constraint, checked, json_schema
from .text.lark import Lark
from .text.load import Text
from .text.reasoning import ReasoningFormat
from .text.tool_formats import CallableTool, ToolCallFormat

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
    """Where they are in the text that the model writes."""

    format: ReasoningFormat
    begun: bool  # the prompt has opened them; otherwise they may come or not


def answer_grammar(text: Text, constraint: Constraint | None, calls: Calls | None, thoughts: Thoughts | None) -> str:
    """For rank 0; "" where everything is allowed. Raises ApiError 400 for what cannot be enforced."""
    wanted = checked(constraint) if constraint is not None else None
    form = text.tool_format
    if calls is not None and (form is None or form.grammar is None):
        if calls.required or constraint is not None:
            raise bad(
                "tool_choice" if calls.required else "tools",
                "calls in this model's format cannot be enforced"
                + (', use tool_choice "auto"' if calls.required else ": leave the tools or the output's format out"),
            )
        calls = None
    if calls is not None and not (calls.required or calls.strict or constraint is not None):
        calls = None
    if calls is None and constraint is None:
        return ""
    if text.reasoning is not None and text.reasoning.dropped:
        field = constraint.field if constraint is not None else "tools"
        raise bad(field, f"{field}: this model marks its answers in a way that cannot be constrained yet, leave it out")
    if calls is None and thoughts is None:
        return json.dumps({"grammars": [wanted]})
    lark = Lark(text.tokenizer.added)
    answers = [] if wanted is None else [lark.part(wanted)]
    if calls is not None:
        assert form is not None
        answers += _answers_with_calls(lark, calls, form, constraint is None and not calls.required)
    start = f"({' | '.join(answers)})"
    if thoughts is not None:
        rest = f"{lark.until(thoughts.format.closes)} {NEWLINES}"
        opens = " | ".join(map(lark.marker, thoughts.format.opens))
        start = f"{rest if thoughts.begun else f'(({opens}) {rest})?'} {start}"
    return lark.grammar(start)


def _answers_with_calls(lark: Lark, calls: Calls, form: ToolCallFormat, free: bool) -> list[str]:
    """The alternatives that are calls; `free`: and those in which text stands before them or alone."""
    assert form.grammar is not None
    written = form.grammar(lark, _callable(lark, calls.tools), calls.parallel)
    if form.bare:
        return [written, rf"/([^\s{re.escape(form.bare)}](?s:.*))?/"] if free else [written]
    if free:
        return [f"{lark.until(form.opens[:1], form.opens[1:])} {written}", lark.text(form.opens)]
    return [f"{lark.marker(form.opens[0])} {written}"]


def _callable(lark: Lark, tools: list[dict[str, Any]]) -> list[CallableTool]:
    found = []
    for tool in tools:
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or {})}
        field = f"tools: parameters of {function['name']}"
        part = checked(json_schema(field, schema, lenient=not function.get("strict")))
        found.append(CallableTool(function["name"], lark.part(part)))
    return found
