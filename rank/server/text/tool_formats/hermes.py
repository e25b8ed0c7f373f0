"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, markers around each call: Hermes, Qwen and many others."""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    calls = " | ".join(lark.call(tool.name, tool.arguments) for tool in tools)
    one = lark.rule(f'"\\n" ({calls}) "\\n" {lark.marker(CLOSE)}')
    return lark.repeated(one, lark.marker(OPEN)) if several else one


FORMAT = ToolCallFormat(
    # Qwen3-Coder and GLM 4.5 use the same markers around XML.
    matches=lambda template: OPEN in template and "<function=" not in template and "<arg_key>" not in template,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
    grammar=grammar,
    unmarked=True,
)
