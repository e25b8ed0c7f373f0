"""Measure the built-in model's skills through a running server, greedy, on held-out exercises.

    python benchmarks/demo_eval.py --base-url http://127.0.0.1:2000/v1 [--items 100] [--json FILE]

Prints the table; exit code 1 if a skill misses its threshold. `--perplexity` measures the held-out text as well,
through /v1/completions with `echo` and `logprobs`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from phalanx.launcher.demo import heldout
from phalanx.launcher.demo.item import Item, judge, split_reply


def post(url: str, body: dict, key: str) -> dict:
    """POST JSON, once more after a 429 or 503."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    for attempt in range(5):
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or attempt == 4:
                raise RuntimeError(f"{url}: {error.code} {error.read()[:300]!r}") from None
            time.sleep(float(error.headers.get("Retry-After", 1)))
    raise AssertionError("unreachable")


def as_request(item: Item, model: str, think: bool | None) -> dict:
    """The exercise as a chat request. Calls in the conversation get the ids that the API wants."""
    messages = []
    for message in item.messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": "call_1", "type": "function",
                 "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]  # fmt: skip
        elif message["role"] == "tool":
            message["tool_call_id"] = "call_1"
        messages.append(message)
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 256}
    if item.tools:
        body["tools"] = item.tools
    if think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": think}
    return body


def answer(item: Item, base: str, model: str, key: str, think: bool | None) -> dict:
    """Ask one exercise. Tool calls and thoughts may come parsed or as the model wrote them."""
    choice = post(base + "/chat/completions", as_request(item, model, think), key)["choices"][0]
    message = choice["message"]
    thought, content, calls = split_reply(message.get("content") or "")
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = function["arguments"]
        calls.append({"name": function["name"], "arguments": arguments})
    ended = choice["finish_reason"] in ("stop", "tool_calls")
    return {
        "question": item.messages[-1]["content"][-200:], "wanted": item.reply(), "content": content, "calls": calls,
        "thought": thought or message.get("reasoning_content") or message.get("reasoning") or "",
        "finish_reason": choice["finish_reason"], "right": judge(item, content, calls, ended),
    }  # fmt: skip


def surprise(document: tuple[list[int], list[bool]], base: str, model: str, key: str) -> tuple[float, int]:
    """Sum of the negative log-probabilities of a document's answer tokens, and how many they are."""
    ids, learn = document
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    found = post(base + "/completions", body, key)["choices"][0]["logprobs"]["token_logprobs"][: len(ids)]
    chosen = [-one for one, wanted in zip(found[1:], learn[1:], strict=True) if wanted]
    return sum(chosen), len(chosen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:2000/v1")
    parser.add_argument("--model", default="phalanx-demo")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--items", type=int, default=100, help="exercises of each skill")
    parser.add_argument("--seed", default="evaluation", help="another one draws other held-out values")
    parser.add_argument("--skill", action="append", help="only this row of the table; may be repeated")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--thinking", choices=("default", "on", "off"), default="default")
    parser.add_argument("--perplexity", type=int, default=0, metavar="N", help="also of N held-out documents")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer here")
    return parser.parse_args()


def main() -> int:
    """Print the table; 1 if a skill is below its threshold."""
    args = arguments()
    base, started, missed = args.base_url.rstrip("/"), time.time(), False
    think = {"default": None, "on": True, "off": False}[args.thinking]
    report: dict = {"thinking": args.thinking, "items": args.items, "seed": args.seed, "table": {}, "answers": {}}
    print(f"{'skill':32} {'at least':>8} {'right':>7}")
    with ThreadPoolExecutor(args.threads) as pool:
        for skill, least, _ in heldout.SKILLS:
            if args.skill and skill not in args.skill:
                continue
            ask = partial(answer, base=base, model=args.model, key=args.api_key, think=think)
            found = list(pool.map(ask, heldout.items(skill, args.items, args.seed)))
            share = sum(one["right"] for one in found) / len(found)
            missed |= share < least
            print(f"{skill:32} {least:8.0%} {share:7.1%}{'' if share >= least else '  missed'}", flush=True)
            report["table"][skill] = {"least": least, "right": share}
            report["answers"][skill] = found
        if args.perplexity:
            measure = partial(surprise, base=base, model=args.model, key=args.api_key)
            sums = list(pool.map(measure, heldout.documents(args.perplexity)))
            report["perplexity"] = math.exp(sum(one for one, _ in sums) / sum(count for _, count in sums))
            print(f"held-out perplexity of answers   {report['perplexity']:.4f}")
    report["seconds"] = round(time.time() - started)
    print(f"{report['seconds']} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
