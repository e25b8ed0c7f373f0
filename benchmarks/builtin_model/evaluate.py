"""Measure the built-in model's skills through a running server, greedy, on held-out exercises.

    phalanx serve --p 2000
    python benchmarks/builtin_model/evaluate.py --base-url http://127.0.0.1:2000/v1 [--items 100] [--json FILE]

Prints the table and some small talk to be read; exit code 1 if a skill misses its threshold. `--perplexity` measures
the held-out text as well, one request to /v1/completions for each token of an answer.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from phalanx.benchmarks.builtin_model import heldout
from phalanx.benchmarks.builtin_model.item import Item, judge, parse_json
from phalanx.benchmarks.builtin_model.words import normal

TALK = "small talk ends by itself"
READ = 20  # of the small talk, kept whole for a person to read
SHORT_THOUGHT = 200  # characters; a sum of two digits in steps takes fewer than 100
TAG = re.compile(r"</?(think|tool_call)>")  # left in the text: the server has not parsed the answer


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
    """Ask one exercise. What counts as a call or a thought is what the server has parsed as one."""
    choice = post(base + "/chat/completions", as_request(item, model, think), key)["choices"][0]
    message = choice["message"]
    content = message.get("content") or ""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            given = json.loads(function["arguments"])
        except ValueError:
            given = function["arguments"]
        calls.append({"name": function["name"], "arguments": given})
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    ended = choice["finish_reason"] in ("stop", "tool_calls")
    return {
        "kind": item.skill, "question": item.messages[-1]["content"][-200:], "wanted": item.reply(),
        "thought": thought, "content": content, "calls": calls, "finish_reason": choice["finish_reason"],
        "right": right(item, thought, content, calls, ended, think is not False),
    }  # fmt: skip


def right(item: Item, thought: str, content: str, calls: list[dict], ended: bool, think: bool) -> bool:
    """`judge`, and what it lets pass: 1 for true, 55 in 1555, --m in --mem, tags in the text, no thought for a sum."""
    if not judge(item, content, calls, ended) or TAG.search(content):
        return False
    if "call" in item.expect:
        return same(calls, [item.expect["call"]])
    if "json" in item.expect:
        return same(parse_json(content), item.expect["json"])
    if item.skill == "add" and think:
        return 0 < len(thought) <= SHORT_THOUGHT
    # a fact's key may be a word's beginning, but a flag is always whole
    whole = [part for part in item.expect.get("all", ()) if part.startswith("--") or "fact" not in item.expect]
    return all(re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", content, re.IGNORECASE) for part in whole)


def same(one: object, other: object) -> bool:
    """Equal as JSON, where neither 1 and true nor 1 and 1.0 are."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def surprise(place: tuple[list[int], int], base: str, model: str, key: str) -> float:
    """The negative log-probability of a token after others.

    A bias makes the server choose the token; log-probabilities are those before any bias.
    """
    before, token = place
    body = {
        "model": model, "prompt": before, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "logit_bias": {str(token): 100}, "return_token_ids": True,
    }  # fmt: skip
    choice = post(base + "/completions", body, key)["choices"][0]
    if choice["token_ids"] != [token]:
        raise RuntimeError(f"the server chose {choice['token_ids']} where a bias of 100 was on token {token}")
    return -choice["logprobs"]["token_logprobs"][0]


def places(count: int) -> list[tuple[list[int], int]]:
    """Each token of the answers in `count` held-out documents, with the tokens before it."""
    return [
        (ids[:at], ids[at])
        for ids, learn in heldout.documents(count)
        for at in range(1, len(ids))
        if learn[at]
    ]  # fmt: skip


def row(least: float, found: list[dict]) -> dict:
    """A skill's row of the table: counts, also of each kind of exercise if it has several; what failed, in full."""
    kinds: dict[str, list[int]] = {}
    for one in found:
        counts = kinds.setdefault(one["kind"], [0, 0])
        counts[0] += one["right"]
        counts[1] += 1
    total = sum(one["right"] for one in found)
    made = {"least": least, "right": total, "of": len(found)}
    if len(kinds) > 1:
        made["kinds"] = {kind: {"right": good, "of": count} for kind, (good, count) in kinds.items()}
    return made | {"failed": [one for one in found if not one["right"]]}


def show(skill: str, made: dict) -> bool:
    """Print a row; whether it reaches its threshold."""
    share = made["right"] / made["of"]
    reached = share >= made["least"]
    kinds = ", ".join(f"{kind} {one['right']}/{one['of']}" for kind, one in made.get("kinds", {}).items())
    print(f"{skill:32} {made['least']:8.0%} {share:7.1%}{'' if reached else '  missed'}  {kinds}".rstrip(), flush=True)
    return reached


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:2000/v1")
    parser.add_argument("--model", default="phalanx-demo")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--items", type=int, default=100, help="exercises of each skill")
    parser.add_argument("--seed", default="evaluation", help="another one draws other held-out values")
    parser.add_argument("--skill", action="append", help="only this row of the table; may be repeated")
    parser.add_argument("--threads", type=int, default=32, help="requests at once")
    parser.add_argument("--thinking", choices=("default", "on", "off"), default="default")
    parser.add_argument("--perplexity", type=int, default=0, metavar="N", help="also of N held-out documents")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and failed answers here")
    return parser.parse_args()


def main() -> int:
    """Print the table; 1 if a skill is below its threshold."""
    args = arguments()
    base, started, missed = args.base_url.rstrip("/"), time.time(), False
    think = {"default": None, "on": True, "off": False}[args.thinking]
    report: dict = {"thinking": args.thinking, "items": args.items, "seed": args.seed, "table": {}}
    print(f"{'skill':32} {'at least':>8} {'right':>7}")
    with ThreadPoolExecutor(args.threads) as pool:
        for skill, least, _ in heldout.SKILLS:
            if args.skill and skill not in args.skill:
                continue
            ask = partial(answer, base=base, model=args.model, key=args.api_key, think=think)
            found = list(pool.map(ask, heldout.items(skill, args.items, args.seed)))
            report["table"][skill] = row(least, found)
            missed |= not show(skill, report["table"][skill])
            if skill == TALK:
                different = {normal(one["question"]): one for one in found}.values()
                report["small_talk"] = [{"user": one["question"], "answer": one["content"]} for one in different][:READ]
        if args.perplexity:
            measure = partial(surprise, base=base, model=args.model, key=args.api_key)
            losses = list(pool.map(measure, places(args.perplexity)))
            report["perplexity"] = {"answers": math.exp(sum(losses) / len(losses)), "tokens": len(losses)}
            print(f"held-out perplexity of answers   {report['perplexity']['answers']:.4f}, {len(losses)} tokens")
    for talk in report.get("small_talk", ()):
        print(f"> {talk['user']}\n{talk['answer']}")
    report["seconds"] = round(time.time() - started)
    print(f"{report['seconds']} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
