"""functools[{"name": …, "arguments": {…}}, …], or the list between <|tool_call|> and <|/tool_call|>: Phi-4 mini."""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat

OPEN, CLOSE, WORD = "<|tool_call|>", "<|/tool_call|>", "functools"


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    return lark.calls(tools, several) + f" {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: "<|/tool|>" in template,
    opens=(OPEN, WORD),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
    grammar=grammar,
    unmarked=True,
)
