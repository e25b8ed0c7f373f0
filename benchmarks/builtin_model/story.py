# ruff: noqa: E501
"""Little stories: what the model tells, and the text in which facts are hidden."""

from __future__ import annotations

import re

from .item import Item
from .words import ANIMALS, COLORS, FOODS, MONTHS, PLACES, WEEKDAYS, Draw, Phrases

STORY_ASKED = Phrases("""
Tell me a story about {a} named {name}.
Tell me a short story about {a} called {name}.
Write a short story about {name}, {a}.
I want to hear a story about {a}. Its name is {name}.
A story about {name} the {animal}, please.
* Please tell a short story about {a} with the name {name}.
* Write a story about {a} named {name}.
""")

STORY = """
{Name} [lived|stayed|slept] in [a|the] {adj} {noun} near the {place}.
[One day|One morning|On {weekday}|In {month}|Late in the evening|Early one day], {name} [found|saw|lost|painted|carried|opened] a {adj} {noun}.
The {noun} was {adj} and [rather|very|quite|a little] {adj2}.
"[What a|Is this a|Look at this] {adj} {noun}[!|?]" said {name}.
{Name} [walked|ran|went|climbed] to the {place} [with|without] the {noun}.
[There|In the {place}|Near the {noun}] {name} met {friend}, [a|an old|a young] friend from {city}.
{Friend} [had|brought|wanted|liked] [some|a plate of|a pot of] {food}.
[Together|Soon|After that|Then|A little later] they [looked for|repaired|cleaned|hid|sold] the {adj} {noun}.
[It was|The day was|The night was] {adj}, and the {place} was [full of people|empty|closed|quiet|open to all].
{Friend} [smiled|laughed|waited|nodded] and [gave|showed|handed] {name} a {color} {noun}.
[The people of {city}|Some travellers|Two children|The neighbors] [came|went|hurried] to the {place} to see it.
{Name} [wrote|read|sent|kept] a {adj} letter about the {noun}.
The {animal} [slept|sat|waited] [under|behind|beside] the {noun} [all day|all night|for hours|until {weekday}].
[Nobody|Everybody|Hardly anybody] in {city} [knew|talked about|cared about] the {noun} in the {place}.
[On {weekday}|In {month}|The next day] the {noun} [broke|was gone|was sold|came back].
A {adj} wind [blew|came] from the {place}, and the {color} {noun} [fell|moved|made a noise].
{Name} [liked|loved|did not like] {food} and [drank|made] [tea|coffee|lemonade] for {friend}.
[For a while|For a moment|Until {weekday}] {name} [forgot|thought of|dreamed of] the {adj} {noun}.
"[We should|Let us|I want to] [go to|see|leave] {city} [in {month}|on {weekday}|soon]," said {friend}.
The {adj} road to {city} [was long|was short|went past the {place}|ended at a {noun}].
"""
ENDS = """
[In the end|At last|Finally] {name} [went home|fell asleep|was happy] with the {noun}.
And so the {noun} [stayed|remained] in the {place}.
{Name} and {friend} [stayed|remained] friends [for a long time|ever after].
After that, {name} never [lost|forgot] the {noun} again.
"""
LINES, LAST_LINES = STORY.strip().splitlines(), ENDS.strip().splitlines()


class Scene:
    """The people and things of one story."""

    def __init__(self, d: Draw, name: str = "", animal: str = ""):
        self.d, self.name, self.friend = d, name or d.person(), d.person()
        self.animal = animal or d.pick(ANIMALS)
        self.nouns = [d.thing() for _ in range(3)]

    def line(self, template: str) -> str:
        """One sentence of the story."""
        d = self.d
        slots = dict(name=self.name, Name=self.name, friend=self.friend, Friend=self.friend, animal=self.animal,
                     noun=d.pick(self.nouns), adj=d.pick(ADJ), adj2=d.pick(ADJ), place=d.pick(PLACES), city=d.city(),
                     weekday=d.pick(WEEKDAYS), month=d.pick(MONTHS), color=d.pick(COLORS), food=d.pick(FOODS))  # fmt: skip
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", d.vary(template).format(**slots))


ADJ = "old new small large quiet strange bright heavy empty broken golden friendly dusty warm cold hidden simple wild clean soft".split()


def sentences(d: Draw, count: int) -> list[str]:
    """Sentences of a story, without its end."""
    scene = Scene(d)
    return [scene.line(d.pick(LINES)) for _ in range(count)]


def story(d: Draw, name: str = "", animal: str = "", low: int = 3, high: int = 6) -> str:
    """A little story."""
    scene = Scene(d, name, animal)
    start = (
        f"[There was once|Once there was|In {d.city()} there was] a {d.pick(ADJ)} {scene.animal} named {scene.name}."
    )
    return " ".join(
        scene.line(line) for line in [start, *(d.pick(LINES) for _ in range(d.integer(low, high))), d.pick(LAST_LINES)]
    )


def tell(d: Draw) -> Item:
    """A story that the user asks for."""
    name, animal = d.person(), d.pick(ANIMALS)
    article = "an" if animal[0] in "aeiou" else "a"
    question = d.say(STORY_ASKED, a=f"{article} {animal}", animal=animal, name=name)
    return Item(
        "story",
        [{"role": "user", "content": question}],
        story(d, name, animal),
        f"A story about {name} the {animal}.",
        expect={"words": True},
    )
