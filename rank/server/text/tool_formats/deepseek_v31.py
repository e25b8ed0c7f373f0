"""DeepSeek V3.1: V3's markers with nothing but name and arguments between them.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from collections.abc import Sequence

from ..heads import NAME, Head
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools, deepseek_v3

CALL, SEPARATOR = deepseek_v3.CALL, deepseek_v3.SEPARATOR
HEAD = Head(rf"\s{{0,8}}{CALL}\s{{0,8}}{NAME}\s{{0,8}}{SEPARATOR}\s{{0,8}}(?=\{{)", f"{CALL}f{SEPARATOR}{{")


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return deepseek_v3.parser(marker, index, tools, HEAD)


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    return deepseek_v3.calls(lark, tools, several, "", "", "")


FORMAT = ToolCallFormat(
    matches=lambda template: deepseek_v3.OPEN in template and deepseek_v3.FENCE not in template,
    opens=(deepseek_v3.OPEN, CALL),
    parser=parser,
    markers=deepseek_v3.FORMAT.markers,
    grammar=grammar,
)
