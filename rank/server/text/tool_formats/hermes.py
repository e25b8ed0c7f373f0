"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, markers around each call: Hermes, Qwen and many others."""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OTHERS = "<function=", "<arg_key>", "]<]minimax[>["  # Qwen3-Coder, GLM 4.5 and MiniMax M3 have the same marker


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    calls = " | ".join(lark.call(tool.name, tool.arguments) for tool in tools)
    one = lark.rule(f'"\\n" ({calls}) "\\n" {lark.marker(CLOSE)}')
    return lark.repeated(one, lark.marker(OPEN)) if several else one


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and not any(one in template for one in OTHERS),
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
    grammar=grammar,
    unmarked=True,
)
