"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, one pair of markers per call: Hermes, Qwen and many others."""

from ..json_calls import JsonCalls
from . import ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"

FORMAT = ToolCallFormat(
    # Qwen3-Coder and GLM 4.5 use the same markers around XML.
    matches=lambda template: OPEN in template and "<function=" not in template and "<arg_key>" not in template,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE, (OPEN,)),
    markers=(CLOSE,),
)
