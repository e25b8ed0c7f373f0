"""functools[{"name": …, "arguments": {…}}, …], or the list between <|tool_call|> and <|/tool_call|>: Phi-4 mini."""

from ..json_calls import JsonCalls
from . import ToolCallFormat

OPEN, CLOSE, WORD = "<|tool_call|>", "<|/tool_call|>", "functools"

FORMAT = ToolCallFormat(
    matches=lambda template: "<|/tool|>" in template,
    opens=(OPEN, WORD),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
)
