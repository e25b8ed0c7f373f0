"""The options of `phalanx chat`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ....rank.options import Spec, flag, specs
from ....rank.sampling_fields import MAX_SEED, MinP, Penalty, RepetitionPenalty, Temperature, TopK, TopP
from ... import find_server

_GROUP, _SAMPLING = "Chat", "Sampling"
field = partial(flag, group=_SAMPLING, metavar="X")  # limits and meaning are those of requests


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
    temperature: Annotated[Temperature | None, field("--temperature")] = None
    top_p: Annotated[TopP | None, field("--top-p", "--top_p")] = None
    top_k: Annotated[TopK | None, field("--top-k", "--top_k", metavar="N")] = None
    min_p: Annotated[MinP | None, field("--min-p", "--min_p")] = None
    presence_penalty: Annotated[Penalty | None, field("--presence-penalty", "--presence_penalty")] = None
    frequency_penalty: Annotated[Penalty | None, field("--frequency-penalty", "--frequency_penalty")] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, field("--repetition-penalty", "--repetition_penalty")] = (
        None
    )
    seed: Annotated[
        int | None,
        flag("--seed", group=_SAMPLING, metavar="N", low=0, high=MAX_SEED, help="equal answers to equal questions"),
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
