"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, one pair of markers per call: Hermes, Qwen and many others."""

from . import Syntax
from .json_calls import JsonCalls

SYNTAX = Syntax(
    name="hermes",
    opens=("<tool_call>",),
    close="</tool_call>",
    # Qwen3-Coder uses the same markers around XML: `<function=`.
    matches=lambda template: "<tool_call>" in template and "<function=" not in template,
    parser=JsonCalls,
)
