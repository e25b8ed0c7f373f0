"""`phalanx bench`: how fast a running server is."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from .... import errors
from ....rank.options import flag
from ... import find_server
from ...options import option_sources
from ...options.help import shown
from . import report, run, workload
from .client import Client, Failure

HELP = "measure a running server: throughput, time to first token, time per token"
USAGE = """phalanx bench [options]: send requests to a running server and tell its throughput and latencies

Without options it finds the server that you have started, on this host or in a job of the cluster. Prompts are random
words, other ones in each run; answers are greedy and of full length. TTFT is the time to the first token, TPOT the time
per token after it. It connects without any proxy. Ends with 1 if a request failed.
"""
_GROUP = "Load"
TIMEOUT = 600.0  # seconds for one request


class BenchOptions(find_server.ServerOptions, frozen=True, kw_only=True):
    """The choices of this verb. benchmarks/serve.py, in the repository, has more."""

    requests: Annotated[int, flag("--requests", group=_GROUP, metavar="N", low=1, help="how many in all")] = 64
    concurrency: Annotated[
        int, flag("--concurrency", group=_GROUP, metavar="N", low=1, help="how many of them at once")
    ] = 8
    # Not `input` and `output`, whose variables are those of `phalanx batch`.
    input_len: Annotated[
        int, flag("--input", "--input-len", group=_GROUP, metavar="N", low=1, help="tokens of a prompt, about")
    ] = 512
    output_len: Annotated[
        int, flag("--output", "--output-len", group=_GROUP, metavar="N", low=1, help="tokens of an answer")
    ] = 128
    json: Annotated[bool, flag("--json", group=_GROUP, off=("--no-json",), help="print JSON; times are in seconds")] = (
        False
    )


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(BenchOptions, argv, os.environ)
    for note in chosen.notes:
        print(f"phalanx: {note}", file=sys.stderr)
    if shown(chosen, USAGE):
        return 0
    server = find_server.chosen(chosen, "bench")
    model = find_server.model(server)
    _check_lengths(chosen.options, model)
    try:
        with run.many_files():
            return asyncio.run(_bench(server, model["id"], chosen.options))
    except Failure as failure:
        raise errors.FatalError(f"{server.url}: {failure}", errors.ERROR) from None
    except KeyboardInterrupt:
        return errors.STOPPED


def _check_lengths(options: BenchOptions, model: dict[str, Any]) -> None:
    wanted, longest = options.input_len + options.output_len, model.get("max_model_len")
    if longest and wanted > longest:
        raise errors.FatalError(
            f"--input {options.input_len} and --output {options.output_len} make {wanted} tokens, but {model['id']} "
            f"takes {longest}: ask for fewer",
            errors.USAGE,
        )


async def _bench(server: find_server.FoundServer, model: str, options: BenchOptions) -> int:
    load = workload.Load(
        input_lens=[options.input_len],
        output_lens=[options.output_len],
        concurrency=options.concurrency,
        seed=secrets.token_hex(8),  # prompts of an earlier run would be in the prefix cache
        ignore_eos=True,
    )
    client = Client(server.url, server.key or "none", TIMEOUT, server.certificate)
    scale = await workload.calibrate(load, client, model)
    if not options.json:
        print(f"{model} at {server.url}; prompts: {scale.note}", flush=True)
    _, figures = await run.measure(load, client, model, scale, options.requests)
    if options.json:
        about = {"model": model, "url": server.url, "concurrency": options.concurrency,
                 "input_len": options.input_len, "output_len": options.output_len}  # fmt: skip
        print(json.dumps(about | report.rounded(figures), indent=1))
    else:
        print(report.table(figures))
    return errors.ERROR if figures["failed"] else errors.OK
