"""{"name": …, "parameters": {…}} as the whole answer, sometimes after <|python_tag|>: Llama 3.1 to 3.3."""

from collections.abc import Sequence

from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    """One call: these models are not taught to make several at once."""
    return f"({' | '.join(lark.call(tool.name, tool.arguments, 'parameters') for tool in tools)})"


FORMAT = ToolCallFormat(
    matches=lambda template: (
        ("<|python_tag|>" in template or '"parameters": dictionary' in template) and "<function=" not in template
    ),
    opens=("<|python_tag|>",),
    parser=lambda marker, index, tools: JsonCalls(marker, index),
    bare="{",
    grammar=grammar,
)
