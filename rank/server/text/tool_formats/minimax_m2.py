"""MiniMax M2: one pair of markers around all calls.

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">VALUE</parameter>
</invoke>
</minimax:tool_call>
"""

from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..tagged_arguments import TaggedArguments, Tags
from . import ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
HEAD = Head(rf'\s{{0,8}}<invoke name="?{NAME}"?>', '<invoke name="f">')
PARAMETER = Head(r'<parameter name="?([^"<>\n]{1,128})"?>', '<parameter name="k">')


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    tags = Tags(PARAMETER, "</parameter>", ("</invoke>",), (CLOSE, OPEN))
    return HeadedCalls(marker, index, HEAD, lambda name: TaggedArguments(tags, tools.get(name, {})), close=(CLOSE,))


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=parser,
    markers=(CLOSE,),
    models=("minimax_m2",),
)
