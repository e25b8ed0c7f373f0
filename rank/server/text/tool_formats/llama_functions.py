"""<function=NAME>{…}</function>: Llama 3.1 and others whose template teaches calls so."""

from collections.abc import Sequence

from ..headed_calls import HeadedCalls, JsonArguments
from ..heads import NAME, Head
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE = "<function=", "</function>"
HEAD = Head(rf"{OPEN}{NAME}>\s{{0,8}}(?=\{{)", OPEN + "f>{")


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    ends = (CLOSE, OPEN)
    return HeadedCalls(
        marker, index, HEAD, lambda name: JsonArguments(ends), close=(CLOSE,), prefix=marker, one=True
    )  # fmt: skip


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    calls = " | ".join(f"{lark.literal(tool.name + '>')} {tool.arguments}" for tool in tools)
    one = lark.rule(f"({calls}) {lark.marker(CLOSE)}")
    return lark.repeated(one, lark.marker(OPEN)) if several else one


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and "tool_call>" not in template,
    opens=(OPEN,),
    parser=parser,
    markers=(CLOSE,),
    grammar=grammar,
)
