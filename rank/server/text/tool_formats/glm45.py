"""GLM 4.5 and later: tags around each argument.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call>
"""

from collections.abc import Sequence

from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..lark import Lark
from ..tagged_arguments import TaggedArguments, Tags
from ..tagged_grammar import tagged_calls
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE, KEY = "<tool_call>", "</tool_call>", "<arg_key>"
HEAD = Head(rf"\s{{0,8}}{NAME}\s{{0,8}}(?={KEY}|{CLOSE})", f"f{KEY}", f"f{CLOSE}")
ARGUMENT = Head(rf"{KEY}([^<]{{1,128}})</arg_key>\s{{0,8}}<arg_value>", f"{KEY}k</arg_key><arg_value>")
VALUE_END = "</arg_value>"
TAGS = Tags(ARGUMENT, VALUE_END, (CLOSE,), again=OPEN, before=KEY, behind="</arg_key>\n<arg_value>")


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(marker, index, HEAD, lambda name: TaggedArguments(TAGS, tools.get(name, {})), one=True)


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    one = tagged_calls(lark, tools, TAGS, "", "\n", CLOSE)
    return lark.repeated(one, lark.marker(OPEN)) if several else one


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and KEY in template,
    opens=(OPEN,),
    parser=parser,
    markers=(CLOSE, KEY, "</arg_key>", "<arg_value>", VALUE_END),
    models=("glm4_moe",),
    grammar=grammar,
    raw=True,
)
