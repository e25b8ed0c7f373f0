"""<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>: Jamba and Hunyuan."""

from ..json_calls import JsonCalls
from . import ToolCallFormat

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"

FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
)
