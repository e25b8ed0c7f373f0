"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3. Granite 4 writes as Hermes does."""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat

OPEN = "<|tool_call|>"


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    return lark.calls(tools, several)


FORMAT = ToolCallFormat(
    # Phi-4 mini has a token of that name as well.
    matches=lambda template: OPEN in template and "<|/tool|>" not in template,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index),
    models=("granite",),
    grammar=grammar,
    unmarked=True,
)
