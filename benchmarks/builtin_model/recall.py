# ruff: noqa: E501
"""Facts in a long text, and questions for them."""

from __future__ import annotations

from .item import Item
from .story import sentences
from .words import ADJECTIVES, COLORS, FOODS, PLACES, WEEKDAYS, Draw, Phrases

# how the fact is stated, how it is asked for, how it is answered, maker of the value; {s} is the subject, {a} the attribute
PERSON_ATTRIBUTES = [
    ("access code", Draw.code), ("badge number", Draw.code), ("locker number", lambda d: d.number(20, 999)),
    ("home town", Draw.city), ("favorite color", lambda d: d.pick(COLORS)), ("favorite food", lambda d: d.pick(FOODS)),
    ("phone number", lambda d: d.number(1000, 999999)), ("birthday", Draw.date), ("best friend", Draw.person),
    ("secret word", Draw.word), ("train number", Draw.code), ("free day", lambda d: d.pick(WEEKDAYS)),
    ("arrival time", Draw.time), ("mail address", Draw.email), ("hiding place", lambda d: d.pick(PLACES)),
    ("seat", Draw.code), ("password", Draw.code), ("account number", lambda d: d.number(1000, 99999)),
    ("dog", Draw.person), ("project", Draw.word),
]  # fmt: skip
THING_ATTRIBUTES = [
    ("price", Draw.decimal), ("weight", lambda d: d.number(20, 9999)), ("color", lambda d: d.pick(COLORS)),
    ("serial number", Draw.code), ("owner", Draw.person), ("place", lambda d: d.pick(PLACES)), ("code", Draw.code),
    ("address", Draw.email), ("opening time", Draw.time), ("delivery date", Draw.date), ("origin", Draw.city),
    ("password", Draw.code), ("label", Draw.word), ("number", lambda d: d.number(20, 9999)),
]  # fmt: skip
TOLD = Phrases("""
The {a} of {s} is {v}.
{v} is the {a} of {s}.
[As for|For|In the case of|Concerning] {s}, the {a} is {v}.
[Remember|Know|Keep in mind|People say|Everybody knows|I heard|They wrote] that the {a} of {s} is {v}.
{S} has the {a} {v}.
{S} has {v} as {a}.
[Note|Remember|A fact|By the way|Listen]: the {a} of {s} is {v}.
[Know|Say|Write down|Keep in mind|We learned|They told us|Remember] that [with|in the case of|as to|regarding] {s} the {a} is {v}.
[About|On|Of|Regarding] {s} [we know|they say|it is said|it was told] that the {a} is {v}.
[It was said|Some say|It is true|It turns out|One should know] that the {a} of {s} is {v}.
[With|Regarding|In the case of|Now for] {s} the {a} is {v}.
The {a} of {s} [is now|was always|happens to be|must be|became] {v}.
* It is known that the {a} of {s} is {v}.
* The {a} belonging to {s} is {v}.
* Note that for {s} the {a} is {v}.
""")
ASKED = Phrases("""
[What is|What's|What was|Which is] the {a} of {s}?
[Which|What] {a} [does|did] {s} have?
[Tell me|Give me|Show me|Look up|Find|Name|State|Say|Repeat] the {a} of {s}.
[I need|I forgot|I want|I look for] the {a} of {s}.
[Do you know|Do you remember|Can you tell me|Could you say|Do you see] the {a} of {s}?
[{a} of {s}|The {a} of {s}][?|, please.|.]
[According to the text|In the text|From the text|In this story|Above], what is the {a} of {s}?
[Find|Look up|Search] the {a} of {s} in the [text|story|passage] [for me|].
[What does it say|What is said|What is written|What do we learn|What can you tell me|What is known] [about|on] the {a} of {s}?
[What|And what] is the {a} of {s} [then|now|please|in the text|there]?
[How is|How does one call] the {a} of {s}?
[Is there|Where is] [a|the] {a} of {s} [in the text|]? [What is it?|Tell me.|]
{S}: [what is the {a}|which {a}|the {a}]?
* What does the text say about the {a} of {s}?
* Please tell me the {a} of {s}.
* Can you find the {a} of {s}?
* What was the {a} of {s} again?
""")
FRAME = Phrases("""
{text}\\n\\n{q}
{text}\\n\\n[Question|My question|Q|The question is|Task|Answer this]: {q}
[Read|Look at|Study|Here is] [this text|a text|this story|the text|the notes|my notes][.|:]\\n\\n{text}\\n\\n[{q}|Question: {q}|Then answer: {q}]
[Here is a text|A story|My notes|Notes|Context|Document]: {text}\\n\\n{q}
{q}\\n\\n{text}\\n\\n{q}
[Text|Story|Context|Notes]:\\n{text}\\n\\n[Answer from the text|Now|So|Question|Use the text]: {q}
[Hello|Hi], [I have|here is] a [text|story] [for you|].\\n{text}\\n[Now a question.|I have a question.|One question:] {q}
* Please read the following text.\\n\\n{text}\\n\\n{q}
* Text: {text}\\n\\nNow answer this: {q}
* {text}\\n\\n{q}
""")


def fact(d: Draw) -> tuple[str, str, object]:
    """Subject, attribute, value."""
    if d.chance(0.55):
        attribute, maker = d.pick(PERSON_ATTRIBUTES)
        subject = d.full_name() if d.chance(0.3) else d.person()
    else:
        attribute, maker = d.pick(THING_ATTRIBUTES)
        subject = f"the {d.pick(ADJECTIVES)} {d.thing()}" if d.chance(0.6) else f"the {d.thing()}"
        if d.chance(0.3):
            attribute = d.value(d.invented)
    return subject, attribute, maker(d)


def facts(d: Draw, count: int) -> list[tuple[str, str, object]]:
    """Different facts; some share their attribute, some their subject."""
    found: dict[tuple[str, str], tuple] = {}
    while len(found) < count:
        subject, attribute, value = fact(d)
        if found and d.chance(0.3):
            other = d.pick(list(found.values()))
            if other[0].startswith("the ") == subject.startswith("the "):
                maker = dict(PERSON_ATTRIBUTES + THING_ATTRIBUTES).get(other[1], Draw.word)
                attribute, value = other[1], maker(d)
        found[subject, attribute] = (subject, attribute, value)
    return list(found.values())


def told(d: Draw, known: tuple) -> str:
    subject, attribute, value = known
    return d.say(TOLD, s=subject, S=subject[0].upper() + subject[1:], a=attribute, v=value)


def exercise(known: tuple, question: str) -> Item:
    """A question for a fact and its answer."""
    subject, attribute, value = known
    answer = f"The {attribute} of {subject} is {value}."
    return Item(
        "recall",
        [{"role": "user", "content": question}],
        answer,
        f"I look for {attribute} of {subject}.",
        expect={"all": [str(value)]},
    )


def ask(d: Draw, known: tuple) -> str:
    text = d.say(ASKED, s=known[0], S=known[0][0].upper() + known[0][1:], a=known[1])
    return text[0].upper() + text[1:]


def passage(d: Draw, known: list[tuple], length: int, measure, depth: float | None = None) -> str:
    """About `length` tokens of story with the facts in it; the first fact at `depth` (0 the beginning, 1 the end).

    `measure` counts the tokens of a text.
    """
    lines: list[str] = []
    total = 0
    while total < length or len(lines) < len(known):
        more = sentences(d, 6)
        total += measure(" ".join(more))
        lines += more
    for place, one in zip(d.some(range(len(lines)), len(known) - 1), known[1:], strict=True):
        lines[place] = told(d, one)
    place = round((depth if depth is not None else d.random.random()) * len(lines))
    lines.insert(place, told(d, known[0]))
    return " ".join(lines)


def roughly(text: str) -> int:
    """Tokens of a text, estimated: words and the spaces between them, and some words of several tokens."""
    return len(text) * 2 // 5


def question_on(d: Draw, text: str, known: tuple) -> Item:
    """The passage and the question in one turn, or the passage as the system's notes."""
    question = ask(d, known)
    if d.chance(0.15):
        item = exercise(known, question)
        item.messages.insert(0, {"role": "system", "content": text})
        return item
    return exercise(known, d.say(FRAME).replace("\\n", "\n").format(text=text, q=question))


def recall(d: Draw, length: int = 1450, measure=roughly, depth: float | None = None) -> Item:
    """One question about a text of about `length` tokens in which several facts stand."""
    known = facts(d, d.integer(3, 6))
    return question_on(d, passage(d, known, length, measure, depth), known[0])


def recalls(d: Draw, length: int, questions: int) -> list[Item]:
    """Several questions about one text, as turns of one conversation."""
    known = facts(d, max(questions, d.integer(2, 8)))
    items = [question_on(d, passage(d, known, length, roughly), known[0])]
    return items + [exercise(one, ask(d, one)) for one in known[1:questions]]
