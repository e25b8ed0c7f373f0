"""DeepSeek V3 and R1: a kind, a name, and the arguments in a block of code.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{…}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from collections.abc import Sequence

from ..headed_calls import HeadedCalls, JsonArguments
from ..heads import NAME, Head
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
HEAD = Head(
    rf"\s{{0,8}}{CALL}\w{{0,32}}{SEPARATOR}{NAME}\s{{0,8}}(?:{FENCE}(?:json)?\s{{0,8}})?(?=\{{)",
    f"{CALL}function{SEPARATOR}f\n{FENCE}json\n{{",
)


def parser(marker: str, index: int, tools: Tools, head: Head = HEAD) -> ToolCallParser:
    ends = (FENCE, CALL_END, CLOSE)
    return HeadedCalls(
        marker,
        index,
        head,
        lambda name: JsonArguments(ends),
        close=(CLOSE,),
        between=(FENCE, CALL_END),
        prefix=marker if marker == CALL else "",
    )


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    return calls(lark, tools, several, "function", f"\n{FENCE}json\n", f"\n{FENCE}")


def calls(lark: Lark, tools: Sequence[CallableTool], several: bool, kind: str, before: str, behind: str) -> str:
    """kind: what stands before the separator, "" where that is the name. before, behind: around the arguments."""
    literal, separator = lark.literal, lark.marker(SEPARATOR)
    heads = (
        f"{literal(kind)} {separator} {literal(tool.name + before)} {tool.arguments} {literal(behind)}"
        if kind
        else f"{literal(tool.name)} {separator} {tool.arguments}"
        for tool in tools
    )
    one = lark.rule(f"{lark.marker(CALL)} ({' | '.join(heads)}) {lark.marker(CALL_END)}")
    return f"{lark.repeated(one) if several else one} {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template and FENCE in template,
    opens=(OPEN, CALL),
    parser=parser,
    markers=(CLOSE, CALL_END, SEPARATOR),
    models=("deepseek_v3",),
    grammar=grammar,
)
