"""Kimi K2. Its ids are functions.NAME:NUMBER; the template wants them back as they were.

<|tool_calls_section_begin|><|tool_call_begin|>ID<|tool_call_argument_begin|>{…}<|tool_call_end|>…
<|tool_calls_section_end|>
"""

import re
from collections.abc import Sequence

from ..headed_calls import HeadedCalls, JsonArguments
from ..heads import Head
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
HEAD = Head(
    rf"\s{{0,8}}{re.escape(CALL)}\s{{0,8}}(?P<id>(?:functions\.)?(?P<name>[\w./-]{{1,128}}?)(?::\d{{1,9}})?)\s{{0,8}}"
    rf"{re.escape(ARGUMENTS)}\s{{0,8}}(?=\{{)",
    f"{CALL}functions.f:0{ARGUMENTS}{{",
)


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(
        marker,
        index,
        HEAD,
        lambda name: JsonArguments((CALL_END, CLOSE)),
        close=(CLOSE,),
        between=(CALL_END,),
        prefix=marker if marker == CALL else "",
        make_id=lambda head: head["id"],
    )


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    heads = (
        f"{lark.literal(f'functions.{tool.name}:')} /[0-9]{{1,3}}/ {lark.marker(ARGUMENTS)} {tool.arguments}"
        for tool in tools
    )
    one = lark.rule(f"{lark.marker(CALL)} ({' | '.join(heads)}) {lark.marker(CALL_END)}")
    return f"{lark.repeated(one) if several else one} {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN, CALL),
    parser=parser,
    markers=(CLOSE, CALL_END, ARGUMENTS),
    models=("kimi_k2",),
    grammar=grammar,
)
