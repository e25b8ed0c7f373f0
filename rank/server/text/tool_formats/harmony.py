"""OpenAI's harmony: a message to a function, in the channel commentary. What it is a reply in is JSON.

<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel. The thoughts are read by the reasoning format of the same name.
"""

import re
from collections.abc import Sequence

from ..headed_calls import HeadedCalls, JsonArguments
from ..heads import Head
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|call|>", "<|end|>", "<|return|>")
FIRST = " to=functions."
HEAD = Head(
    rf"(?:{re.escape(FIRST)})?(?:functions\.)?(?P<name>[\w.-]{{1,128}})\s{{0,8}}"
    rf"(?:{re.escape(CHANNEL)}(?:commentary|analysis)\s{{0,8}})?"
    rf"(?:{re.escape(CONSTRAIN)})?\w{{0,32}}{re.escape(MESSAGE)}\s{{0,8}}(?=\{{)",
    *(f"functions.f{CHANNEL}{channel} {CONSTRAIN}json{MESSAGE}{{" for channel in ("commentary", "analysis")),
)


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(
        marker,
        index,
        HEAD,
        lambda name: JsonArguments(ENDS),
        close=ENDS,
        prefix=marker if marker == FIRST else "",
        one=True,
    )


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    """One call: the model's answer ends with it."""
    behind = lark.marker(f" {CONSTRAIN}json{MESSAGE}")
    return lark.rule(
        " | ".join(f"{lark.literal(f'functions.{tool.name}')} {behind} {tool.arguments}" for tool in tools)
    )  # fmt: skip


FORMAT = ToolCallFormat(
    matches=lambda template: CHANNEL in template and MESSAGE in template,
    opens=(f"{CHANNEL}commentary to=", f"{CHANNEL}analysis to=", FIRST),
    parser=parser,
    markers=(CHANNEL, MESSAGE, CONSTRAIN, "<|start|>", *ENDS),
    models=("gpt_oss",),
    grammar=grammar,
)
