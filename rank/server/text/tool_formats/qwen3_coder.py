"""Qwen3-Coder: XML-like calls, a tag for each argument.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from collections.abc import Sequence

from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..lark import Lark
from ..tagged_arguments import TaggedArguments, Tags
from ..tagged_grammar import tagged_calls
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
HEAD = Head(rf"\s{{0,8}}{FUNCTION}{NAME}>", FUNCTION + "f>")
PARAMETER = Head(r"<parameter=([^<>\n]{1,128})>", "<parameter=k>")
TAGS = Tags(
    PARAMETER,
    "</parameter>",
    ("</function>",),
    (CLOSE,),
    OPEN,
    lines=True,
    before="<parameter=",
    behind=">",
    after_end=(CLOSE, OPEN, FUNCTION),
)


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(
        marker,
        index,
        HEAD,
        lambda name: TaggedArguments(TAGS, tools.get(name, {})),
        close=(CLOSE,),
        prefix=marker if marker == FUNCTION else "",  # models forget the marker before it
    )


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    begin = "\n" + FUNCTION
    if marker == FUNCTION:
        begin = ""
    one = tagged_calls(lark, tools, TAGS, begin, ">\n", f"</function>\n{CLOSE}")
    return lark.repeated(one, lark.marker(OPEN)) if several and marker == OPEN else one


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and FUNCTION in template,
    opens=(OPEN, FUNCTION),
    parser=parser,
    grammar=grammar,
    markers=(CLOSE,),
    raw=True,
)
