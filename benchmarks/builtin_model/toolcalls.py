# ruff: noqa: E501
"""Exercises on tools: call the right one with exact arguments, leave tools alone, answer from a result."""

from __future__ import annotations

import json
import re
from typing import Any

from .familiar import EXTRA, FAMILIAR
from .item import Item
from .toolkit import KINDS, VERBS
from .words import NOUNS, Draw, Phrases

FAMILIAR_ASK = [Phrases(entry[3]) for entry in FAMILIAR]
POLITE = Phrases("""
{0}
{0}
{0}
[Please|Please,|Would you please|Would you|If possible,|Be so kind and] {1}
[Could|Can|Will|Would] you [|please|now|quickly|also] {1}
[I need|I want|I ask|I would love] you to {1}
[I want to|I need to|I have to|We must|We want to|I would like to|Let us|Help me to|Help me] {1}
[Hello|Hey|Hi there|Good morning|Ok|Well|So|Now], {1}
[Hello.|Hey!|One thing:|Task:|To do:|Next:] {0}
* {0}
* Hi, can you {1}
* I would like you to {1}
""")
OBJECT = Phrases("""
[the|a|my|our|that|his|her|their|one|some|another|your] {noun}
[the|a|my|our|that|the whole] {noun} [|here|there|of mine|for me]
* the {noun}
* this {noun}
""")
DESCRIBE = Phrases("""
{Verb} [the|a|one] {noun}.
{Verb} [the|a] {noun} [for somebody|in the system|by its data|].
[Use this to|Call this to|With this you can|This will|This can|A function to|Tool to] {verb} [the|a] {noun}.
[Can|Will] {verb} [the|a|any] {noun}.
[Lets you|Allows to|Makes it possible to] {verb} [the|a] {noun}.
[{Verb} function|Function to {verb}] for [the|a] {noun}.
* Helps to {verb} a {noun}.
* {Verb} the {noun} for the user.
""")
NAMED = Phrases("""
with [the|] {n} {v}
[and|,] [set|make|put] [the|] {n} [to|as] {v}
[using|taking|giving|choosing] {v} [as|for] [the|] {n}
({n}: {v})
({n} = {v})
[,|and] {n} [is|should be|must be|will be|equals] {v}
[the|whose|its] {n} is {v}
for the {n} [take|use] {v}
* where {n} is {v}
* with {v} as {n}
""")
MIDDLE = "main first new user my target given chosen local remote quick smart home work cloud office city team shop lab".split()


def article(text: str) -> str:
    """The text with "an" where a vowel follows."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


class Tool:
    """A tool's schema, and how a request asks for it."""

    def __init__(self, name: str, description: str, words: list[str], job: str):
        self.name, self.description, self.words = name, article(description), words
        self.job = job  # in fixed words, whatever words the request and the description use
        self.arguments: dict[str, tuple[dict, bool]] = {}  # schema, required
        self.plan: list[tuple[str, str, Any]] = []  # argument, kind, phrases

    def schema(self, d: Draw) -> dict:
        properties = {name: schema for name, (schema, _) in self.arguments.items()}
        parameters = {"type": "object", "properties": properties}
        required = [name for name, (_, needed) in self.arguments.items() if needed]
        if required or d.chance(0.5):
            parameters["required"] = required
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def joined(d: Draw, words: list[str]) -> str:
    """Words as one name: snake_case mostly."""
    style = d.random.random()
    if style < 0.75:
        return "_".join(words)
    if style < 0.92:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return "-".join(words) if style < 0.96 else "".join(words)


def tool_name(d: Draw, words: list[str]) -> str:
    """A name around these words; the held-out ones are names no training tool has."""

    def make():
        more = list(words)
        if d.chance(0.3):
            more.insert(d.integer(0, len(more)), d.pick(MIDDLE))
        elif d.chance(0.3):
            more.insert(d.integer(0, len(more)), d._syllables(d.integer(1, 2)))
        return joined(d, more)

    return d.value(make)


def argument_name(d: Draw, names: tuple[str, ...]) -> str:
    """A name for an argument; the held-out ones are new."""

    def make():
        roll = d.random.random()
        base = d.pick(names)
        if roll < 0.45 and not d.held:
            return base
        if roll < 0.8:
            return joined(d, d.some([base, d.pick(MIDDLE)], 2))
        return joined(d, [d._syllables(d.integer(1, 2))] + [base] * d.chance(0.6))

    return d.value(make)


def add_argument(d: Draw, tool: Tool, kind: str, required: bool = True) -> None:
    """Give the tool an argument of this kind."""
    names, kind_type, _, descriptions = (KINDS.get(kind) or EXTRA[kind])[:4]
    name = argument_name(d, names)
    if name in tool.arguments:
        name = d.value(d.invented)
    schema: dict = {"type": "string", "enum": list(kind_type)} if isinstance(kind_type, list) else {"type": kind_type}
    if d.chance(0.7) or not any(word in name.lower() for word in names):
        schema["description"] = d.pick(descriptions)
    tool.arguments[name] = (schema, required)
    phrases = KINDS[kind][4] if kind in KINDS else None
    if kind in KINDS and (kind == "flag" or d.chance(0.3)):
        phrases = NAMED if kind != "flag" else phrases
    tool.plan.append((name, kind, phrases))


def familiar(d: Draw, index: int) -> Tool:
    """A tool for an everyday job, under some name."""
    names, description, kinds, _ = FAMILIAR[index]
    tool = Tool(tool_name(d, d.pick(names.split()).split("_")), description, [], names.split()[0].replace("_", " "))
    for kind in kinds.split():
        add_argument(d, tool, kind)
    return tool


def generic(d: Draw, verbs: list[str], noun: str) -> Tool:
    """A tool that does `verbs` to `noun`."""
    verb = d.pick(verbs)
    name = tool_name(d, d.pick(([d.pick(verbs), noun], [d.pick(verbs), noun], [noun, d.pick(verbs)])))
    if d.chance(0.08):
        name = d.value(lambda: joined(d, [d._syllables(2), d._syllables(1)]))
    tool = Tool(
        name, d.say(DESCRIBE, verb=verb, Verb=verb.capitalize(), noun=noun), [d.pick(verbs), noun], f"{verbs[0]} {noun}"
    )
    kinds = d.some([kind for kind in KINDS], d.pick((0, 1, 1, 2, 2, 3)))
    for place, kind in enumerate(kinds):
        add_argument(d, tool, kind, kind != "flag" and (place == 0 or d.chance(0.7)))
    return tool


def request(d: Draw, tool: Tool, index: int | None) -> tuple[str, dict]:
    """A sentence that asks for this tool, and the arguments it gives. Optional ones may be left out."""
    values, said = {}, {}
    for name, kind, phrases in tool.plan:
        value, written = (KINDS.get(kind) or EXTRA[kind])[2](d)
        if index is None and not tool.arguments[name][1] and d.chance(0.4):
            continue
        values[name] = value
        said[kind if index is not None else name] = (
            written if index is not None else d.say(phrases, v=written, n=name.replace("_", " "))
        )
    if index is not None:
        return d.say(FAMILIAR_ASK[index], **said), values
    order = d.some(list(said.values()), len(said))
    sentence = " ".join([tool.words[0], article(d.say(OBJECT, noun=tool.words[1])), *order])
    return d.say(POLITE).format(sentence[0].upper() + sentence[1:], sentence) + d.pick((".", ".", "")), values


def offer(d: Draw, low: int, high: int) -> tuple[list[tuple[Tool, int | None]], int]:
    """Some different tools and which of them is meant; distractors often share its verb or its noun."""
    count = d.integer(low, high)
    nouns, verbs, everyday = d.some(NOUNS, count), d.some(VERBS, count), d.some(range(len(FAMILIAR)), count)
    near = d.chance(0.3)
    tools: list[tuple[Tool, int | None]] = []
    for place in range(count):
        if d.chance(0.45):
            tools.append((familiar(d, everyday[place]), everyday[place]))
        else:
            same_noun = near and d.chance(0.5)
            noun = nouns[0] if same_noun else nouns[place]
            verb = verbs[0] if near and not same_noun else verbs[place]
            tools.append((generic(d, verb, noun), None))
    return tools, d.integer(0, count - 1)


def random_tools(d: Draw) -> list[dict]:
    """Tools that merely stand there."""
    return [tool.schema(d) for tool, _ in offer(d, 1, 4)[0]]


SYSTEMS = (
    "",
    "",
    "",
    "You are a helpful assistant.",
    "Use the functions when they help.",
    "You are Phalanx, a small assistant.",
)


def with_system(d: Draw, question: str) -> list[dict]:
    """The question, sometimes after a system message."""
    system = d.pick(SYSTEMS)
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]


def call(d: Draw) -> Item:
    """The right tool of those offered, with exact arguments."""
    offered, wanted = offer(d, 1, 4)
    tool, index = offered[wanted]
    question, arguments = request(d, tool, index)
    arguments = {name: arguments[name] for name in tool.arguments if name in arguments}
    made = {"name": tool.name, "arguments": arguments}
    given = ", ".join(arguments) if arguments else "no arguments"
    return Item(
        "call",
        with_system(d, question),
        "",
        f"Wanted: {tool.job}. {tool.name} does this, with {given}.",
        [tool.schema(d) for tool, _ in offered],
        [made],
        {"call": made},
    )


NONE = Phrases(
    """
I have no function for [that|this].
None of my functions [can do|does|fits] [that|this].
Sorry, none of the functions [fits this request|can do this].
I cannot do [that|this] with [the|my] functions [I have|].
That is not possible with my functions.
""",
    shared=True,
)
HAVE = Phrases(
    """
I can use {names}.
The functions are {names}.
What I have is {names}.
""",
    shared=True,
)


def none_fits(d: Draw) -> Item:
    """A request for a tool that is not among those offered."""
    offered, wanted = offer(d, 2, 5)
    tool, index = offered.pop(wanted)
    question, _ = request(d, tool, index)
    answer = d.say(NONE)
    if d.chance(0.3):
        answer += " " + d.say(HAVE, names=" and ".join(other.name for other, _ in offered))
    return Item(
        "no_call",
        with_system(d, question),
        answer,
        f"Wanted: {tool.job}. None of the functions does this.",
        [tool.schema(d) for tool, _ in offered],
        expect={"words": True},
    )


RESULTS = Phrases(
    """
The {k} is {v}.
The result says that the {k} is {v}.
{K}: {v}.
It has the {k} {v}.
""",
    shared=True,
)
DONE = ("Done.", "Here is the result.", "It worked.", "I have the answer.", "")
RESULT_KEYS = """temperature status total price distance humidity wind position number size weight owner place delay speed score level
balance rate duration progress color title version""".split()


def result(d: Draw) -> tuple[str, str, list[str]]:
    """A tool's result, an answer as text and the values that the answer must have."""
    if d.chance(0.12):
        reason = d.pick(
            ("not found", "permission denied", "timed out", f"unknown id {d.code()}", f"no {d.word()} there")
        )
        return json.dumps({"error": reason}), f"That did not work: {reason}.", [reason]
    found: dict = {}
    for _ in range(d.integer(1, 3)):
        key = d.value(lambda: d.pick(RESULT_KEYS)) if d.chance(0.7) else d.value(d.invented)
        found[key] = d.pick((d.number, d.word, d.code, d.person, d.city, d.decimal, d.time, d.date))()
    sentences = [d.say(RESULTS, k=key, K=key.capitalize(), v=value) for key, value in found.items()]
    return json.dumps(found), " ".join([d.pick(DONE), *sentences]).strip(), [str(value) for value in found.values()]


def answer_result(d: Draw) -> Item:
    """An answer as text after a tool result."""
    item = call(d)
    returned, answer, values = result(d)
    done = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": item.calls[0]}]}
    return Item(
        "result",
        [*item.messages, done, {"role": "tool", "content": returned}],
        answer,
        "The function returned an answer.",
        item.tools,
        expect={"all": values},
    )
