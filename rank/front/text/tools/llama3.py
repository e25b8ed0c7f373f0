"""{"name": …, "parameters": {…}} as the whole answer, sometimes after <|python_tag|>: Llama 3.1 to 3.3."""

from . import Syntax
from .json_calls import JsonCalls

SYNTAX = Syntax(
    name="llama3",
    opens=("<|python_tag|>", "{"),
    close="",
    matches=lambda template: "<|python_tag|>" in template or '"parameters": dictionary' in template,
    parser=JsonCalls,
    at_start=True,
)
