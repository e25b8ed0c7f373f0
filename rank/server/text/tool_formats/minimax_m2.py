"""MiniMax M2: one pair of markers around all calls.

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">VALUE</parameter>
</invoke>
</minimax:tool_call>
"""

from collections.abc import Sequence

from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..lark import Lark
from ..tagged_arguments import TaggedArguments, Tags
from ..tagged_grammar import tagged_calls
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
HEAD = Head(rf'\s{{0,8}}<invoke name="?{NAME}"?>', '<invoke name="f">')
PARAMETER = Head(r'<parameter name="?([^"<>\n]{1,128})"?>', '<parameter name="k">')
TAGS = Tags(
    PARAMETER, "</parameter>", ("</invoke>",), (CLOSE, OPEN), before='<parameter name="', behind='">'
)  # fmt: skip


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(marker, index, HEAD, lambda name: TaggedArguments(TAGS, tools.get(name, {})), close=(CLOSE,))


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    one = tagged_calls(lark, tools, TAGS, '\n<invoke name="', '">\n', "</invoke>\n")
    return f"{one}{f' {one}*' if several else ''} {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=parser,
    grammar=grammar,
    markers=(CLOSE,),
    raw=True,
    models=("minimax_m2",),
)
