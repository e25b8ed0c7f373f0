"""GLM 4.5 and later: a pair of tags for each argument.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call>
"""

from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..tagged_arguments import TaggedArguments, Tags
from . import ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE, KEY = "<tool_call>", "</tool_call>", "<arg_key>"
HEAD = Head(rf"\s{{0,8}}{NAME}\s{{0,8}}(?={KEY}|{CLOSE})", f"f{KEY}", f"f{CLOSE}")
ARGUMENT = Head(rf"{KEY}([^<]{{1,128}})</arg_key>\s{{0,8}}<arg_value>", f"{KEY}k</arg_key><arg_value>")
VALUE_END = "</arg_value>"


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    tags = Tags(ARGUMENT, VALUE_END, (CLOSE,), (OPEN,))
    return HeadedCalls(marker, index, HEAD, lambda name: TaggedArguments(tags, tools.get(name, {})), one=True)


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and KEY in template,
    opens=(OPEN,),
    parser=parser,
    markers=(CLOSE, KEY, "</arg_key>", "<arg_value>", VALUE_END),
    models=("glm4_moe",),
)
