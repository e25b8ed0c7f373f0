"""One exercise: a conversation, the answer wanted, how an answer is judged; and its text, as tokens are made of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from .template import TOOLS_HEAD, TOOLS_TAIL

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Item:
    """A conversation up to the point where the model must answer, and what it should answer."""

    skill: str
    messages: list[dict]
    answer: str = ""
    thought: str = ""
    tools: list[dict] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)  # {"name": …, "arguments": {…}}
    expect: dict = field(default_factory=dict)  # how `judge` compares

    def reply(self) -> str:
        """The answer as the model writes it, without its thought."""
        parts = [self.answer] if self.answer else []
        for call in self.calls:
            body = json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
            parts.append(f"<tool_call>\n{body}\n</tool_call>")
        return "\n".join(parts)


def judge(item: Item, content: str, calls: list[dict], ended: bool) -> bool:
    """Whether an answer is right. It must have ended by itself, not by the limit of tokens."""
    expect, content = item.expect, content.strip()
    if not ended:
        return False
    if "call" in expect:
        return calls == [expect["call"]]
    if calls or not content:
        return False
    if "equal" in expect:
        return content == expect["equal"]
    if "number" in expect:
        found = re.findall(r"-?\d+", content.replace(",", ""))
        return bool(found) and int(found[-1]) == expect["number"]
    if "json" in expect:
        return parse_json(content) == expect["json"]
    if "all" in expect:
        return all(part.lower() in content.lower() for part in expect["all"])
    return True


def parse_json(content: str):
    """The JSON object in an answer, bare or in a fence; None if there is none."""
    content = re.sub(r"^```(?:json)?\s*|\s*```$", "", content.strip())
    try:
        return json.loads(content)
    except ValueError:
        return None


def split_reply(text: str) -> tuple[str, str, list[dict]]:
    """Raw text of an answer into thought, content and calls. A call that is no JSON counts as a wrong one."""
    thought, _, rest = text.rpartition("</think>")
    calls = []
    for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", rest, re.S):
        try:
            call = json.loads(body)
            calls.append({"name": call["name"], "arguments": call["arguments"]})
        except (ValueError, KeyError, TypeError):
            calls.append({"name": "", "arguments": body})
    content = re.sub(r"<tool_call>.*?(</tool_call>|$)", "", rest, flags=re.S)
    return thought.replace("<think>", "").strip(), content.strip(), calls


def system_text(system: str, tools: list[dict]) -> str:
    """The system turn's text, as the chat template writes it."""
    if not tools:
        return system
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (system + "\n\n" if system else "") + TOOLS_HEAD + listed + TOOLS_TAIL


def prompt(messages: list[dict], tools: list[dict]) -> str:
    """A conversation of system, user and tool turns and plain assistant turns as the chat template renders it."""
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    out = [f"<|im_start|>system\n{system_text(system, tools)}<|im_end|>\n"] if system or tools else []
    for message in messages[1 if system else 0 :]:
        role, content = message["role"], message["content"]
        if role == "tool":
            out.append(f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n")
            continue
        if role == "assistant":
            content = Item(
                "", [], content or "", calls=[call["function"] for call in message.get("tool_calls", [])]
            ).reply()
        out.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return "".join(out)


def pieces(items: list[Item], think: bool, dense: bool) -> list[tuple[str, bool]]:
    """Several exercises as one conversation: (text, whether the model learns to write it).

    The template drops the thoughts of earlier turns, so only the last answer is seen as at run time. `dense`
    keeps them, which lets the model learn from every turn.
    """
    first = items[0]
    head = first.messages[0]["content"] if first.messages[0]["role"] == "system" else ""
    tools = first.tools
    out: list[tuple[str, bool]] = []
    if head or tools:
        out.append((f"<|im_start|>system\n{system_text(head, tools)}<|im_end|>\n", False))
    for index, item in enumerate(items):
        turns = item.messages[1:] if item.messages[0]["role"] == "system" else item.messages
        out.append((prompt(turns, []) + "<|im_start|>assistant\n", False))
        last = index == len(items) - 1
        if last or dense:
            thought = f"<think>\n{item.thought}\n</think>\n\n"
            out += [(thought, True)] if think else [(EMPTY_THOUGHT, False)]
        out += [(item.reply() + "<|im_end|>", last or dense), ("\n", False)]
    return out
