"""<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>: Jamba and Hunyuan."""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    return lark.calls(tools, several) + f" {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
    grammar=grammar,
    unmarked=True,
)
