"""Measures a running OpenAI-compatible server: latencies, throughput, failures.

    python benchmarks/serve.py --port 2000 --batch 64 --concurrency 16 --input-len 512 --output-len 128

Every request streams over a connection of its own. TTFT is the time from sending to the first event with text; TPOT
the time from there to the end, per output token after the first; inter-token the gaps between events, of which one
can carry several tokens ("an event" in the table has how many); end-to-end goes to the event with the finish_reason.
A request that was retried is timed from its first attempt. Token counts are the server's own (usage); a request
without them has failed. With --request-rate, requests come as a Poisson process and are not held back unless
--concurrency is given too.

Prompts are random words, each prompt other words. Before the run two prompts of known numbers of words ask for one
token each; from the server's usage.prompt_tokens follow the tokens per word and those of the chat template, and so the
number of words for --input-len, right to a few percent. The history and --image are in addition to them. --token-ids
sends exactly that many token ids to /v1/completions instead, taken from those that the server reports for such a text
(`return_token_ids`). The same seed gives the same prompts, which a second run may find in the prefix cache.

With --beside a stream of text begins after the warm-up and goes on during the load. The gaps between its events, before
and during the load, are what prompts and images cost those who are reading.

`phalanx bench` measures with the same client (launcher/commands/bench) and has fewer flags. The client runs in one
thread and tells what share of a core it took; above 80 % it warns. Against serving/dummy.py on the same machine (2
shared cores of an EPYC, Python 3.11) it took 7 to 11 µs an event: 22 to 30 % of a core for 256 streams of 100 tokens/s
each, 43 % for 256 of 200, 99 % at the 150,000 tokens/s that it carried at most; plan for half of that. A burst of 256
requests got its first tokens after 20 to 60 ms there, from a server that needs up to 10: less than that is the client's
own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import difflib
import json
import platform
import sys
from typing import Any, NoReturn, TextIO
from urllib.parse import urlsplit

import msgspec
from phalanx.launcher.commands.bench import report, run, workload
from phalanx.launcher.commands.bench.client import Client, Failure
from phalanx.launcher.commands.bench.report import Result
from phalanx.launcher.commands.bench.workload import Load

CONCURRENCY = 8


class Parser(argparse.ArgumentParser):
    """One line for a wrong flag, with the nearest right one."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            near = difflib.get_close_matches(unknown.split()[0], list(self._option_string_actions), 1)
            message = f"there is no flag {unknown.split()[0]}" + (f", did you mean {near[0]}?" if near else "")
        self.exit(2, f"serve.py: {message}\n")


def _whole(low: int) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        return value

    return integer


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


_number.__name__ = "number"


def _lengths(text: str) -> list[int]:
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths such as 128,512,2048")
    return values


def parser() -> Parser:
    """The flags. candle-vLLM's names, also with underscores."""
    made = Parser(prog="serve.py", description="Measures a running OpenAI-compatible server.", allow_abbrev=False)
    add = made.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", help="http://HOST:PORT, with or without /v1 (default: 127.0.0.1 and --port)")
    add("--port", type=_whole(1), help="of the server (2000)")
    add("--api-key", default="EMPTY", metavar="KEY")
    add("--model", default="any", metavar="NAME", help="any: the first that /v1/models lists")
    add("--endpoint", choices=("chat", "completions"), help="default: chat")
    add("--timeout", type=_number, default=600, metavar="S", help="seconds for one attempt (600)")
    add("--max-retries", type=_whole(0), default=2, metavar="N", help="of refused, lost or overloaded requests (2)")
    add = made.add_argument_group("load").add_argument
    add("--num-prompts", "--batch", type=_whole(1), default=8, metavar="N", help="requests in all (8)")
    add("--concurrency", type=_whole(0), metavar="N", help="at once; 0: no limit (8, no limit with --request-rate)")
    add("--request-rate", type=_number, default=0, metavar="R", help="mean arrivals a second; 0: all at once (0)")
    add(
        "--beside", type=_whole(0), default=0, metavar="N", help="a stream of N tokens beside the load, timed apart (0)"
    )
    add("--warmup", type=_whole(0), default=0, metavar="N", help="requests of the same kind before, not counted (0)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (0)")
    add = made.add_argument_group("prompts").add_argument
    add("--input-len", type=_whole(1), default=4096, metavar="N", help="tokens of a prompt (4096)")
    add("--output-len", "--max-tokens", type=_whole(1), default=1024, metavar="N", help="tokens of an answer (1024)")
    add("--input-lens", type=_lengths, metavar="N,N,…", help="each prompt's length is drawn from these")
    add("--output-lens", type=_lengths, metavar="N,N,…", help="each answer's length is drawn from these")
    add("--token-ids", action="store_true", help="prompts as token ids, of exact length, to /v1/completions")
    add(
        "--image",
        type=_whole(0),
        default=0,
        metavar="SIDE",
        help="a random image of SIDE x SIDE pixels in each (0: none)",
    )
    add("--history-turns", type=_whole(0), default=0, metavar="N", help="earlier questions with answers (0)")
    add("--history-tokens", type=_whole(1), default=64, metavar="N", help="of each message of the history (64)")
    add("--history-reasoning-tokens", type=_whole(0), default=0, metavar="N", help="of each earlier answer (0)")
    add = made.add_argument_group("sampling").add_argument
    add("--temperature", type=_number, default=0.0, help="(0)")
    for name in ("--top-p", "--min-p", "--frequency-penalty", "--presence-penalty", "--repetition-penalty"):
        add(name, type=float, metavar="X")
    for name in ("--top-k", "--repeat-last-n"):
        add(name, type=int, metavar="N")
    add("--thinking", action=argparse.BooleanOptionalAction, help="ask for reasoning, or for none")
    add("--ignore-eos", action="store_true", help="answers of full length")
    add = made.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="a JSON line per request and a last one for the run")
    add("--print-request-metrics", action="store_true", help="a row per request")
    add("--print-samples", action="store_true", help="what the server wrote")
    add("--sample-chars", type=_whole(0), default=1200, metavar="N", help="of each sample (1200)")
    return made


def read(argv: list[str]) -> argparse.Namespace:
    """The flags in force: what depends on other flags is filled in or refused."""
    made = parser()
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    args = made.parse_args(words)
    args.input_lens = args.input_lens or [args.input_len]
    args.output_lens = args.output_lens or [args.output_len]
    if args.endpoint == "chat" and args.token_ids:
        made.error("--token-ids needs --endpoint completions: a chat takes text only")
    args.endpoint = args.endpoint or ("completions" if args.token_ids else "chat")
    if args.endpoint == "completions" and (args.history_turns or args.image or args.thinking is not None):
        made.error("--history-turns, --image and --thinking need --endpoint chat")
    if args.concurrency is None:
        args.concurrency = 0 if args.request_rate else CONCURRENCY
    args.base_url = _root(made, args)
    return args


def _root(made: Parser, args: argparse.Namespace) -> str:
    """The server's address without /v1."""
    url = (args.base_url or "http://127.0.0.1").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        made.error(f"--base-url {args.base_url}: {error}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        made.error(f"--base-url {args.base_url}: expected http://HOST:PORT or https://…")
    if port and args.port not in (None, port):
        made.error(f"--base-url {args.base_url} has another port than --port {args.port}: give one of them")
    if not port and (args.port or not args.base_url):
        url = parts._replace(netloc=f"{parts.netloc}:{args.port or 2000}").geturl()
    return url


def load_of(args: argparse.Namespace) -> Load:
    same = {field.name: getattr(args, field.name) for field in dataclasses.fields(Load) if hasattr(args, field.name)}
    return Load(**same, keep_text=args.print_samples)


async def models(client: Client) -> Any:
    """The answer of /v1/models; None where a server has no such page."""
    try:
        return msgspec.json.decode(await client.call("GET", "/v1/models"))
    except Failure as failure:
        if failure.status in (404, 405, 501):
            return None
        raise
    except msgspec.DecodeError as error:
        raise Failure(f"{client.root}/v1/models is not JSON ({error}): is this an OpenAI-compatible server?") from None


async def bench(args: argparse.Namespace, file: Any) -> int:
    """The whole run; its exit code."""
    client, load = Client(args.base_url, args.api_key, args.timeout), load_of(args)
    known = await models(client)
    entry = known["data"][0] if isinstance(known, dict) and known.get("data") else {}
    model = entry.get("id", "any") if args.model == "any" else args.model
    longest = max(args.input_lens) + max(args.output_lens)
    if (entry.get("max_model_len") or longest) < longest:
        say(f"note: the model takes {entry['max_model_len']} tokens, --input-len and --output-len make {longest}")
    scale = await workload.calibrate(load, client, model)
    print(f"{model} at {args.base_url}{workload.path(load)}; prompts: {scale.note}", flush=True)
    results, figures = await run.measure(load, client, model, scale, args.num_prompts, args.warmup, args.beside)
    if args.print_samples:
        print(samples(results, args.sample_chars))
    if args.print_request_metrics:
        print(per_request(results))
    print(report.table(figures, args.request_rate))
    if file:
        flags = {key: value for key, value in vars(args).items() if key not in ("api_key", "json")}
        write(file, flags, known, scale.note, results, figures)
    return 1 if figures["failed"] else 0


def per_request(results: list[Result]) -> str:
    """A row for each request."""
    rows = ["request   sent s  prompt  output   TTFT ms   TPOT ms     e2e ms  end"]
    for r in results:
        if r.error:
            rows.append(f"{r.job.index:7} {r.sent:8.2f} failed: {r.error}")
            continue
        tpot = "-" if r.tpot is None else f"{r.tpot * 1000:.2f}"
        rows.append(
            f"{r.job.index:7} {r.sent:8.2f} {r.prompt_tokens:7} {r.output_tokens:7} {r.ttft * 1000:9.2f} "
            f"{tpot:>9} {r.e2e * 1000:10.2f}  {r.finish}{f', {r.retries} retries' if r.retries else ''}"
        )
    return "\n".join(rows)


def samples(results: list[Result], chars: int) -> str:
    """The server's answers, each cut to `chars`."""
    return "\n".join(f"--- request {r.job.index}: {r.error or ''}\n{r.text[:chars]}" for r in results)


def line_of(result: Result) -> dict[str, Any]:
    names = ("retries", "error", "prompt_tokens", "output_tokens", "cached_tokens", "finish")
    values = {
        "kind": "request",
        "index": result.job.index,
        "due_s": result.job.due,
        "sent_s": result.sent,
        "wanted_input": result.job.wanted_input,
        "wanted_output": result.job.wanted_output,
    }
    values |= {name: getattr(result, name) for name in names}
    if not result.error:
        values |= {"ttft_s": result.ttft, "tpot_s": result.tpot, "e2e_s": result.e2e, "gaps_s": result.gaps}
    return report.rounded(values)


def write(
    file: TextIO, flags: dict[str, Any], models: Any, note: str, results: list[Result], figures: dict[str, Any]
) -> None:
    """One line per request and one for the whole run."""
    last = {
        "kind": "summary",
        "host": platform.node(),
        "flags": flags,
        "models": models,
        "prompts": note,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **report.rounded(figures),
    }
    for line in (*map(line_of, results), last):
        file.write(json.dumps(line) + "\n")


def say(text: str) -> None:
    print(f"serve.py: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """0: every request was answered; 1: one was not, or the server is not usable; 2: a wrong flag."""
    args = read(sys.argv[1:] if argv is None else argv)
    try:  # before the run, which may take hours
        file = open(args.json, "w") if args.json else None  # noqa: SIM115
    except OSError as error:
        say(f"--json {args.json}: {error.strerror}")
        return 2
    try:
        with run.many_files():
            return asyncio.run(bench(args, file))
    except Failure as failure:
        say(f"{args.base_url}: {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if file:
            file.close()


if __name__ == "__main__":
    sys.exit(main())
