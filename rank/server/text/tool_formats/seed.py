"""Seed-OSS: as Qwen3-Coder's calls, between markers of its own.

<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
"""

from ..headed_calls import HeadedCalls
from ..tagged_arguments import TaggedArguments, Tags
from . import ToolCallFormat, ToolCallParser, Tools
from .qwen3_coder import HEAD, PARAMETER

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    tags = Tags(PARAMETER, "</parameter>", ("</function>",), (CLOSE, OPEN))
    return HeadedCalls(
        marker, index, HEAD, lambda name: TaggedArguments(tags, tools.get(name, {})), close=(CLOSE,)
    )  # fmt: skip


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=parser,
    markers=(CLOSE,),
    models=("seed_oss",),
)
