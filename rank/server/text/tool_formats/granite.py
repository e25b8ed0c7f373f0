"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3. Granite 4 writes as Hermes does."""

from ..json_calls import JsonCalls
from . import ToolCallFormat

OPEN = "<|tool_call|>"

FORMAT = ToolCallFormat(
    # Phi-4 mini has a token of that name as well.
    matches=lambda template: OPEN in template and "<|/tool|>" not in template,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index),
    models=("granite",),
)
