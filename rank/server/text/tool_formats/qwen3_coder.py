"""Qwen3-Coder: XML-like calls, a tag for each argument.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..tagged_arguments import TaggedArguments, Tags
from . import ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
HEAD = Head(rf"\s{{0,8}}{FUNCTION}{NAME}>", FUNCTION + "f>")
PARAMETER = Head(r"<parameter=([^<>\n]{1,128})>", "<parameter=k>")


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    tags = Tags(PARAMETER, "</parameter>", ("</function>",), (CLOSE, OPEN), lines=True)
    return HeadedCalls(
        marker,
        index,
        HEAD,
        lambda name: TaggedArguments(tags, tools.get(name, {})),
        close=(CLOSE,),
        prefix=marker if marker == FUNCTION else "",  # models forget the marker before it
    )


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and FUNCTION in template,
    opens=(OPEN, FUNCTION),
    parser=parser,
    markers=(CLOSE,),
)
