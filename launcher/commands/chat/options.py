"""The options of `phalanx chat`."""

from __future__ import annotations

from typing import Annotated

from ....rank.options import Spec, flag, specs
from ... import find_server

_GROUP, _SAMPLING = "Chat", "Sampling"


class ChatOptions(find_server.ServerOptions, frozen=True, kw_only=True):
    """The choices of this verb; the others are the server's."""

    system: Annotated[
        str,
        flag("--system", "--system-prompt", "--system_prompt", group=_GROUP, metavar="TEXT",
             help="what the model is told first"),
    ] = ""  # fmt: skip
    live: Annotated[
        bool, flag("--live", group=_GROUP, off=("--no-live",), help="render Markdown while the answer comes")
    ] = False
    frequency: Annotated[
        float,
        flag("--frequency", group=_GROUP, metavar="N", low=0.5, high=60, help="how often a second --live draws"),
    ] = 10.0  # fmt: skip
    stream: Annotated[
        bool, flag("--stream", group=_GROUP, off=("--no-stream",), help="show an answer when it is whole")
    ] = True
    thinking: Annotated[
        bool | None, flag("--thinking", group=_GROUP, off=("--no-thinking",), help="let the model reason first")
    ] = None
    mcp: Annotated[
        str, flag("--mcp", group=_GROUP, metavar="FILE", help="mcp.json: tool servers that the model may use")
    ] = ""
    approve: Annotated[
        bool, flag("--approve", group=_GROUP, off=("--no-approve",), help="ask before each call of a tool")
    ] = False
    temperature: Annotated[
        float | None, flag("--temperature", group=_SAMPLING, metavar="X", low=0, help="0 is greedy")
    ] = None
    top_p: Annotated[
        float | None, flag("--top-p", "--top_p", group=_SAMPLING, metavar="X", low=0, high=1, help="1 keeps all")
    ] = None
    top_k: Annotated[
        int | None, flag("--top-k", "--top_k", group=_SAMPLING, metavar="N", low=-1, help="0 keeps all")
    ] = None
    min_p: Annotated[
        float | None,
        flag("--min-p", "--min_p", group=_SAMPLING, metavar="X", low=0, high=1, help="relative to the likeliest"),
    ] = None  # fmt: skip
    presence_penalty: Annotated[
        float | None,
        flag("--presence-penalty", "--presence_penalty", group=_SAMPLING, metavar="X", low=-2, high=2,
             help="0 is none"),
    ] = None  # fmt: skip
    frequency_penalty: Annotated[
        float | None,
        flag("--frequency-penalty", "--frequency_penalty", group=_SAMPLING, metavar="X", low=-2, high=2,
             help="0 is none"),
    ] = None  # fmt: skip
    repetition_penalty: Annotated[
        float | None,
        flag("--repetition-penalty", "--repetition_penalty", group=_SAMPLING, metavar="X", low=0.01, help="1 is none"),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None, flag("--seed", group=_SAMPLING, metavar="N", low=0, help="equal answers to equal questions")
    ] = None
    max_tokens: Annotated[
        int | None,
        flag(
            "--max-tokens",
            "--max_tokens",
            group=_SAMPLING,
            metavar="N",
            low=1,
            help="longest answer; unless given what the context allows, and 256 for a base model",
        ),
    ] = None


def sampling() -> dict[str, Spec]:
    """The options that are fields of requests."""
    return {name: spec for name, spec in specs(ChatOptions).items() if spec.flag.group == _SAMPLING}
