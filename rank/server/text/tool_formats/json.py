"""{"name": …, "arguments": {…}} or a list of such, as the whole answer or in a block of code.

This is for models whose own way is not known. The name has to be that of an offered tool, so that an answer which is
JSON stays one.
"""

from ..json_calls import JsonCalls
from . import ToolCallFormat

OPEN, CLOSE = "```json", "```"

FORMAT = ToolCallFormat(
    matches=lambda template: False,
    opens=(OPEN,),
    parser=lambda marker, index, tools: JsonCalls(marker, index, CLOSE if marker else "", known=tools),
    bare="{[",
)
