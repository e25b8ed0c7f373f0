"""<|tool_call_start|>[NAME(KEY=VALUE, …), …]<|tool_call_end|>, calls of Python: LFM2."""

from __future__ import annotations

from collections.abc import Sequence

from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools, pythonic

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
LIST = "<|tool_list_start|>"  # before the tools, where templates show no call


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return pythonic.calls(marker, index, tools, (CLOSE,))


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    return f"{pythonic.grammar(lark, tools, several, '')} {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template or LIST in template,
    opens=(OPEN,),
    parser=parser,
    markers=(CLOSE,),
    models=("lfm2", "lfm2_moe"),
    grammar=grammar,
)
