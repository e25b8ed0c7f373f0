"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, one pair of markers per call: Hermes, Qwen and many others."""

from ..json_calls import JsonCalls
from . import ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"

FORMAT = ToolCallFormat(
    # Qwen3-Coder uses the same markers around XML: `<function=`.
    matches=lambda template: OPEN in template and "<function=" not in template,
    opens=(OPEN,),
    parser=lambda marker, index: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
)
