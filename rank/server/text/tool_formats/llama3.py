"""{"name": …, "parameters": {…}} as the whole answer, sometimes after <|python_tag|>: Llama 3.1 to 3.3."""

from ..json_calls import JsonCalls
from . import ToolCallFormat

FORMAT = ToolCallFormat(
    matches=lambda template: (
        ("<|python_tag|>" in template or '"parameters": dictionary' in template) and "<function=" not in template
    ),
    opens=("<|python_tag|>",),
    parser=lambda marker, index, tools: JsonCalls(marker, index),
    bare="{",
)
