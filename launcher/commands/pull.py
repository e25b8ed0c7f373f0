"""`phalanx pull`: fetch a model before the job, where there is a network."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Annotated

import msgspec

from ... import errors
from ...logs import say
from ...rank.options import flag
from .. import hf_hub
from ..options import option_sources
from ..options.help import shown

HELP = "fetch a model from the Hugging Face hub, before a job without network"
USAGE = """phalanx pull ID [options]: fetch a model such as Qwen/Qwen3-0.6B from the Hugging Face hub

Without --to it goes where Hugging Face's own tools keep theirs ($HF_HOME), and `phalanx serve ID` finds it there.
The same command goes on after an interruption. HF_TOKEN is the key to private models, HF_ENDPOINT another hub.
"""
_GROUP = "Pull"


class PullOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str, flag("--model", "--m", "--model-id", group=_GROUP, metavar="ID", positional=True, help="organisation/name")
    ] = ""
    weight_file: Annotated[
        str, flag("--f", "--weight-file", group=_GROUP, metavar="FILE", help="one GGUF file of it, with its shards")
    ] = ""
    to: Annotated[str, flag("--to", group=_GROUP, metavar="DIR", help="put its files into this directory")] = ""
    revision: Annotated[
        str, flag("--revision", group=_GROUP, metavar="REV", help="a branch, a tag or a commit; none: main")
    ] = ""


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(PullOptions, argv, os.environ)
    if shown(chosen, USAGE):
        return 0
    for note in chosen.notes:
        say(note)
    options = chosen.options
    if not hf_hub.is_id(options.model):
        wrong = f"{options.model!r} is no id" if options.model else "an id is needed"
        raise errors.FatalError(f"{wrong}: phalanx pull ORGANISATION/NAME, such as Qwen/Qwen3-0.6B", errors.USAGE)
    if options.weight_file:
        if options.to or options.revision:
            raise errors.FatalError(
                "--f goes into the cache alone, from main: leave --to and --revision out", errors.USAGE
            )
        path = hf_hub.gguf(options.model, options.weight_file, pulling=True)
        say(f"complete; serve it with: phalanx serve --model {options.model} --f {shlex.quote(options.weight_file)}")
        print(path)
        return 0
    path = hf_hub.fetch(options.model, options.revision, os.path.expanduser(options.to), pulling=True)
    by_id = not options.to and not options.revision
    say(f"complete; serve it with: phalanx serve {shlex.quote(options.model if by_id else path)}")
    print(path)
    return 0
