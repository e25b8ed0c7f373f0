# ruff: noqa: E501
"""Questions about Phalanx itself, from facts.md, in many wordings."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from .item import Item
from .words import Draw, Phrases, normal

FRAMES = Phrases("""
{q}
{q}
{q}
{q}
{q}
{q}
[Question|A question|Quick question|One more question|My question|Next question|Tell me|Please tell me|About Phalanx|Phalanx]: {l}
[Hello|Hi|Good morning|Excuse me|Sorry|Well|Ok|Now|So|And|But|Listen], {l}
[Hi!|Hello.|I have a question.|I am new to this.|I need help.|Help!|I read the docs.|I am confused.] {q}
{q} [Please explain.|I am new to this.|Thanks!|Thanks a lot.|Many thanks.|Thank you very much!|Please help.|I do not know.|I forgot.]
{q} [in Phalanx|with Phalanx|here|please|exactly|again]?
[Do you know:|Can you say:|Explain:|Can you help me:] {l}
* {q}
* {q}
* Hey, {l}
* Could you tell me: {l}
* {q} Thank you.
""")
# Words that may stand for each other in a question about a serving engine.
SYNONYMS = [
    group.split("|")
    for group in """
how do I|how can I|how to|how could I|how should I|what is the way to|tell me how to|explain how to|show me how to|I want to know how to
start|launch|run|begin
machine|computer
nodes|hosts
show|print|display
set|choose|select|pick
change|adjust
which flag|what flag|which option|what option|which switch|what parameter
which endpoint|what endpoint|which path|what URL|which route
which command|what command
what happens if|what if|what happens when
is there|do you have|does Phalanx have
what does error|what is error
mean|stand for
flags|options|switches|arguments
tell me about|explain|describe
fetch|download|get
quickest|fastest|easiest|simplest
stop|end|shut down|quit
see|look at|view
switch off|turn off|disable
several|many|multiple
weights|model files|checkpoint
prints|shows
why do I get|why is there|why does it say
need|require
""".strip().splitlines()
]
SWAPS = {word.lower(): group for group in SYNONYMS for word in group}
FIND = re.compile(r"\b(" + "|".join(sorted(map(re.escape, SWAPS), key=len, reverse=True)) + r")\b", re.IGNORECASE)
WEAK = set("the a an is are of to for do does i it my in on can you me that which what how with and there".split())


@cache
def sections() -> list[tuple[str, list[str], Phrases]]:
    """(answer, what it must contain, questions) of every fact."""
    text = (Path(__file__).resolve().parent / "facts.md").read_text(encoding="utf-8")
    found = []
    for section in text.split("\n## ")[1:]:
        answer, keys, *questions = section.strip().splitlines()
        marked = "\n".join(("* " if line[0] == "+" else "") + line[2:] for line in questions)
        found.append((answer, [key.strip() for key in keys.removeprefix("Key:").split(";")], Phrases(marked)))
    return found


@cache
def held_wordings() -> frozenset[str]:
    return frozenset().union(*(questions.reserved for _, _, questions in sections()))


@cache
def common_words() -> tuple[str, ...]:
    """Words that stand in the questions of many facts and so hardly tell which one is meant."""
    counts: Counter[str] = Counter()
    for _, _, questions in sections():
        counts.update({word for line in questions.train for word in re.findall(r"[a-z]+", line.lower())})
    return tuple(sorted(word for word, count in counts.items() if count >= 12))


def loosen(d: Draw, question: str) -> str:
    """Other words, fewer words, a slip of the keyboard: what training sees in addition to the wordings as written."""
    question = FIND.sub(lambda found: d.pick(SWAPS[found[0].lower()]) if d.chance(0.4) else found[0], question)
    words = question.split()
    if d.chance(0.25):
        words = [word for word in words if word.lower() not in WEAK or d.chance(0.5)] or words
    if len(words) > 2 and d.chance(0.08):
        del words[d.integer(0, len(words) - 1)]
    if d.chance(0.3):
        words = [
            d.pick(common_words()) if word.lower().strip("?.,") in common_words() and d.chance(0.3) else word
            for word in words
        ]
    if d.chance(0.15):
        words.insert(d.integer(0, len(words)), d.pick(common_words()))
    if len(words) > 2 and d.chance(0.08):
        place = d.integer(0, len(words) - 1)
        word = words[place]
        if len(word) > 3:
            cut = d.integer(1, len(word) - 2)
            words[place] = word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :]
    question = " ".join(words) or question
    return question[0].upper() + question[1:]


def about(d: Draw, index: int | None = None) -> Item:
    """A question about Phalanx and its answer."""
    place = d.integer(0, len(sections()) - 1) if index is None else index
    answer, keys, questions = sections()[place]
    question = d.say(questions)
    if not d.held and d.chance(0.6):
        question = loosen(d, question)
    if not d.held and normal(question) in held_wordings():
        return about(d, index)
    low = question[0].lower() + question[1:] if question[1:2].islower() or question[1:2] == " " else question
    question = d.say(FRAMES, q=question, l=low)
    if d.chance(0.15):
        question = question.lower() if not d.held or d.chance(0.3) else question
    if d.chance(0.2):
        question = question.rstrip("?.")
    messages = [{"role": "user", "content": question}]
    if d.chance(0.2):
        messages.insert(
            0,
            {
                "role": "system",
                "content": d.pick(
                    (
                        "You are a helpful assistant.",
                        "You are Phalanx, a small assistant.",
                        "You help users of Phalanx.",
                        "Answer briefly.",
                    )
                ),
            },
        )
    return Item("facts", messages, answer, "A question about Phalanx.", expect={"all": keys, "fact": place})
