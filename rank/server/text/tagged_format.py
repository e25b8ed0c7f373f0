"""Formats that differ in their markers alone: markers around all calls, and a tag for each argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .headed_calls import HeadedCalls
from .heads import Head
from .lark import Lark
from .tagged_arguments import TaggedArguments, Tags
from .tagged_grammar import tagged_calls
from .tool_formats import CallableTool, ToolCallFormat, ToolCallParser, Tools


class Around(NamedTuple):
    """How a call is written, newlines as the model has them."""

    before: str  # the function's name
    behind: str  # it
    end: str  # of the call


def tagged_format(open: str, close: str, head: Head, tags: Tags, around: Around, model: str) -> ToolCallFormat:
    """open, close: the markers. head: of a call, as it is read. model: the model_type whose format it is."""

    def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
        return HeadedCalls(marker, index, head, lambda name: TaggedArguments(tags, tools.get(name, {})), close=(close,))

    def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
        one = tagged_calls(lark, tools, tags, *around)
        return f"{lark.repeated(one) if several else one} {lark.marker(close)}"

    return ToolCallFormat(
        matches=lambda template: open in template,
        opens=(open,),
        parser=parser,
        grammar=grammar,
        markers=(close,),
        raw=True,
        models=(model,),
    )
