"""{"name": …, "arguments": {…}} or a list of such, as the whole answer or in a block of code.

This is for models whose own way is not known. The name has to be that of an offered tool, so that an answer which is
JSON stays one.
"""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat

OPEN, CLOSE = "```json", "```"


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    one = lark.rule(" | ".join(lark.call(tool.name, tool.arguments) for tool in tools))
    calls = f"({one} | {lark.calls(tools, True)})" if several else one
    return f'"\\n" {calls} "\\n" {lark.marker(CLOSE)}' if marker else calls


FORMAT = ToolCallFormat(
    matches=lambda template: False,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE if marker else "", known=tools),
    grammar=grammar,
    bare="{[",
)
