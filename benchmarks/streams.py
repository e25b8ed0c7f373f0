"""The cost of many clients' streams for the step loop: the pace of its steps against that of the same work without
them.

    python benchmarks/streams.py [--streams 256] [--step-ms 10] [--rounds 5]

A server whose model only takes its time (serving/paced.py) generates for --streams sequences alternately: each a stream
of a client of its own, an event a token; and all as the choices of a few answers that are sent whole at the end. Both
give scheduler and model the same steps. The pace is the server's own, from a request's first token to its last
(phalanx_time_per_output_token_seconds). The exit code is 1 unless the median round of streams is at most --most times
the median one without, and where that one has no time between its tokens. Clients run next to the server, on the same
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
from typing import Any

from phalanx.benchmarks.crowd import paced
from phalanx.launcher.commands.bench.client import Answer, Client, Failure
from phalanx.launcher.commands.bench.run import many_files

CHOICES = 128  # of one answer, the most that a request may ask for
TPOT = "phalanx_time_per_output_token_seconds"


def body(tokens: int, **more: Any) -> bytes:
    options = {"include_usage": True} if more.get("stream") else None
    asked = {"prompt": [300], "max_tokens": tokens, "ignore_eos": True, "stream_options": options, **more}
    return json.dumps(asked).encode()


async def observed(client: Client) -> tuple[float, float]:
    """Sum and count of all requests so far."""
    text = (await client.call("GET", "/metrics")).decode()
    found = [re.search(rf"^{TPOT}_{name} (\S+)$", text, re.MULTILINE) for name in ("sum", "count")]
    return tuple(float(one[1]) if one else 0.0 for one in found)  # type: ignore[return-value]


async def pace(client: Client, bodies: list[bytes], streamed: bool) -> float:
    """Seconds between the tokens of these requests, asked at once."""
    before = await observed(client)
    calls = (client.call("POST", "/v1/completions", one, Answer() if streamed else None) for one in bodies)
    await asyncio.gather(*calls)
    for _ in range(100):  # a request is counted just after its last byte
        after = await observed(client)
        if after[1] - before[1] == len(bodies):
            return (after[0] - before[0]) / len(bodies)
        await asyncio.sleep(0.05)
    raise Failure(f"{after[1] - before[1]:g} of {len(bodies)} requests were counted")


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    client = Client(f"http://127.0.0.1:{asked.port}", "EMPTY", timeout=120)
    streams = [body(asked.tokens, stream=True)] * asked.streams
    left = [min(CHOICES, asked.streams - at) for at in range(0, asked.streams, CHOICES)]
    whole = [body(asked.tokens, n=n) for n in left]
    found: dict[str, list[float]] = {"streams": [], "whole": []}
    for _ in range(asked.rounds + 1):
        found["whole"].append(await pace(client, whole, False))
        found["streams"].append(await pace(client, streams, True))
    rounds = {name: [round(1e3 * one, 3) for one in values[1:]] for name, values in found.items()}  # the first warms up
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    if not medians["whole"]:  # the server process stood still meanwhile
        raise Failure("the server saw all tokens of an answer at once: nothing to compare with; ask for more --tokens")
    return {
        "streams": asked.streams,
        "step_ms": asked.step_ms,
        "ms_a_step": rounds,
        "median_ms": medians,
        "ratio": round(medians["streams"] / medians["whole"], 4),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0, help="what the model takes for a step (10)")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (200)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, besides one of each before (5)")
    parser.add_argument("--most", type=float, default=1.05, help="the ratio that is allowed (1.05)")
    asked = parser.parse_args(argv)
    asked.prefill = 1e9  # prompts of others do not count
    try:
        with many_files(), paced(asked):
            found = asyncio.run(measure(asked))
    except Failure as failure:
        print(f"streams.py: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(found))
    return 0 if found["ratio"] <= asked.most else 1


if __name__ == "__main__":
    sys.exit(main())
