"""Seed-OSS: as Qwen3-Coder's calls, between markers of its own.

<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
"""

from collections.abc import Sequence

from ..headed_calls import HeadedCalls
from ..lark import Lark
from ..tagged_arguments import TaggedArguments, Tags
from ..tagged_grammar import tagged_calls
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools
from .qwen3_coder import HEAD, PARAMETER

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
TAGS = Tags(PARAMETER, "</parameter>", ("</function>",), (CLOSE, OPEN), before="<parameter=", behind=">")


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(
        marker, index, HEAD, lambda name: TaggedArguments(TAGS, tools.get(name, {})), close=(CLOSE,)
    )  # fmt: skip


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    one = tagged_calls(lark, tools, TAGS, "\n<function=", ">\n", "</function>\n")
    return f"{one}{f' {one}*' if several else ''} {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=parser,
    grammar=grammar,
    markers=(CLOSE,),
    raw=True,
    models=("seed_oss",),
)
