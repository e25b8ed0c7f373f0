# ruff: noqa: E501
"""Words, names, numbers and phrasings, and the line between what is trained on and what is held out.

A name, code, number or text is held out by its hash; a phrasing if it is marked with a star where it is
written. A `Draw` hands out one side only, so the two sets are disjoint by construction, whatever is built of them.
Common nouns and adjectives are on both sides (a word that is one token can only be spelled by who has seen it spelled);
texts made of them are not.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from typing import Any

ONSETS = "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sp st t th tr v w y z".split()
VOWELS = "a e i o u a e i o u ai ea ee ia io oo ou ay".split()
CODAS = ["", "", "", "", "", "", "l", "m", "n", "n", "r", "r", "s", "t", "x", "ck", "nd", "st", "rn", "lt", "sh", "ng"]
SYLLABLES = [o + v + c for o in ONSETS for v in VOWELS for c in CODAS]

PEOPLE = """Alice Bruno Carla David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Peter Rosa Simon
Tanya Victor Wanda Yusuf Zoe Amir Bella Cyrus Diana Emil Fiona Georg Hanna Ivan Julia Kofi Leila Marco Nadia Oscar
Paula Ravi Sofia Tomas Ursula Viola Walter Ximena Yara Anton Beatrix Clara Dmitri Esther Farid Gloria Henrik Ingrid
Jakob Kira Laura Mateo Nora Otto Priya Quentin Ruth Stefan Tessa Umberto Vera Wilma Arthur Bianca Colin Dora Edgar
Frida Gustav Helena Isaac Jasmin Kurt Lydia Martin Noel Omar Petra Rafael Selma Theo Ulrike Vincent Yvonne Anna Ben
Chen Daria Erik Flora Grace Hassan Iris Jack Kenji Lena Mia Noah Olivia Paul Rita Sam Tina Uma Leo Max Emma Tom""".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Athens Warsaw Budapest Zurich Geneva Lyon
Milan Naples Turin Porto Seville Valencia Hamburg Munich Cologne Dresden Leipzig Stockholm Helsinki Copenhagen Tallinn
Riga Vilnius Krakow Sofia Bucharest Belgrade Zagreb Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi
Manila Jakarta Singapore Sydney Melbourne Perth Auckland Cairo Lagos Nairobi Accra Tunis Casablanca Toronto Montreal
Vancouver Boston Chicago Denver Seattle Dallas Houston Miami Atlanta Detroit Phoenix Portland Austin Lima Bogota Quito
Santiago Montevideo Havana Mexico Brasilia Recife Marseille Bordeaux Nice Toulouse Antwerp Brussels Rotterdam Utrecht
Bergen Malmo Turku Bern Basel Graz Salzburg Innsbruck Stuttgart Bremen Bonn Nantes Bilbao Granada Bologna Verona""".split()
NOUNS = """account album alarm apple archive article backup badge ball banner basket battery bicycle blanket board boat book
bottle box bracelet branch bridge brush bucket budget button cable calendar camera candle card carpet cart chair chapter
clock cloud coat coin column compass contract cookie counter cup curtain deposit desk device dictionary document door
drawer drum engine envelope fan feather fence file filter flag flower folder fork form garden gate glass glove guitar
hammer harbor hat helmet image index invoice island jacket jar journal key kettle keyboard label ladder lamp lantern
lesson letter library license list lock machine magnet map market mask medal message mirror model monitor motor
mug needle net notebook office orange order page paint panel parcel passport pencil photo piano picture pillow pipe
plan plant plate playlist pocket poem policy poster printer profile project pump puzzle queue radio receipt recipe
record report ribbon ring river road robot roof room rope route ruler sample scanner schedule scarf screen script
sensor server shelf ship shirt shoe signal sketch spoon stamp station stone stove street subscription suitcase switch
table tank tape task teapot telescope tent thread ticket timer tool torch towel tower train tree truck tunnel umbrella
valve vase violin wagon wall wallet watch wheel whistle window wire workshop""".split()
ADJECTIVES = """amber ancient bright broken busy calm careful clean clever cold cool crisp curious dark deep dusty eager early
empty fast fine fresh friendly gentle golden grand green happy heavy hidden honest huge humble kind large late lazy
light little long loud lucky mild modern narrow neat new noisy old open pale patient plain polite proud quick quiet
rare rich rough round rusty sharp short shy silent silver simple slow small smooth soft solid spare steady strange
strong sweet tall thin tidy tiny warm wide wild wise young""".split()
COLORS = "red blue green yellow black white purple brown grey pink orange".split()
ANIMALS = """cat dog horse owl fox rabbit mouse bear duck goose sheep goat wolf otter badger hedgehog sparrow crow turtle frog
squirrel donkey lion tiger elephant penguin dolphin""".split()
FOODS = """bread soup rice pasta salad cheese pizza pancakes curry noodles porridge stew dumplings omelette cake tea coffee
lemonade honey apples""".split()
PLACES = """kitchen attic cellar garage garden library office hallway workshop barn studio harbor station market museum school
tower bakery hospital theatre""".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
COUNT = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty""".split()

KNOWN = PEOPLE + CITIES + NOUNS + ADJECTIVES + COLORS + ANIMALS + FOODS + PLACES + WEEKDAYS + MONTHS + COUNT


def held_out(text: str) -> bool:
    """Whether a value belongs to the held-out eighth. Case does not matter, so that no spelling crosses the line."""
    return zlib.crc32(("held out? " + text.lower()).encode()) % 8 == 0


def normal(text: str) -> str:
    """A text without case and punctuation: what counts as the same wording. A slot is any number."""
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", re.sub(r"\{\w*\}", "0", text.lower().replace("\\n", " "))).split())


def expansions(lines: tuple[str, ...]) -> frozenset[str]:
    """All wordings that some phrasings stand for; those of nothing but slots are no wordings."""
    found = set()
    for line in lines:
        parts = [part.split("|") for part in re.split(r"[\[\]]", line)]
        found |= {normal("".join(chosen)) for chosen in itertools.product(*parts)}
    return frozenset(one for one in found if re.search("[a-z]", one))


class Phrases:
    """Phrasings, one a line, [a|b] for a choice; a leading star marks those that training never sees.

    `shared` ones are answers: a model can only answer what it was taught, so both sides have the same wordings.
    """

    def __init__(self, text: str, shared: bool = False):
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        self.train = tuple(line for line in lines if not line.startswith("*"))
        self.held = self.train if shared else tuple(line[1:].strip() for line in lines if line.startswith("*"))
        self.reserved = frozenset() if shared else expansions(self.held)


class Draw:
    """A seeded source of values from one side of the line."""

    def __init__(self, seed, held: bool = False):
        self.random = random.Random(seed)
        self.held = held
        self.pick = self.random.choice
        self.chance = lambda p: self.random.random() < p
        self.integer = self.random.randint

    def say(self, phrases: Phrases, **slots) -> str:
        """One phrasing of this side with its slots filled."""
        text = self.wording(phrases)
        return text.format(**slots) if slots else text

    def wording(self, phrases: Phrases) -> str:
        """One phrasing of this side."""
        text = self.vary(self.pick((phrases.held or phrases.train) if self.held else phrases.train))
        while not self.held and normal(text) in phrases.reserved:
            text = self.vary(self.pick(phrases.train))
        return text

    def vary(self, text: str) -> str:
        """Choose one of each [a|b|c]; an empty choice leaves nothing."""
        if "[" not in text:
            return text
        chosen = re.sub(r"\[([^\]]*)\]", lambda found: self.pick(found[1].split("|")), text)
        return re.sub(r" +(?=[.?](\s|$))", "", re.sub(r" +", " ", chosen)).strip()

    def value(self, make) -> Any:
        """A value of this side out of `make`, a function without arguments or a list to choose from."""
        while True:
            found = make() if callable(make) else self.pick(make)
            if held_out(str(found)) == self.held:
                return found

    def some(self, items, count: int) -> list:
        """`count` different items, in random order."""
        return self.random.sample(items, count)

    def _syllables(self, count: int) -> str:
        next_float, size = self.random.random, len(SYLLABLES)
        return "".join([SYLLABLES[int(next_float() * size)] for _ in range(count)])

    def invented(self) -> str:
        """A word that no dictionary has: of syllables, or of the halves of two known words."""
        return self.value(self._blend if self.chance(0.4) else self._coined)

    def _coined(self) -> str:
        return self._syllables(2 if self.random.random() < 0.7 else self.integer(1, 3))

    def _blend(self) -> str:
        first, second = self.pick(KNOWN), self.pick(KNOWN)
        return (first[: self.integer(2, 5)] + second[-self.integer(2, 5) :]).lower()

    def word(self) -> str:
        """A word, half the time an invented one."""
        if self.chance(0.5):
            return self.invented()
        return self.pick(self.pick((NOUNS, ADJECTIVES, NOUNS, ANIMALS, FOODS)))

    def thing(self) -> str:
        """A noun, known or invented."""
        return self.invented() if self.chance(0.4) else self.pick(self.pick((NOUNS, NOUNS, ANIMALS)))

    def words(self, low: int, high: int) -> list[str]:
        """Between `low` and `high` different words."""
        found: dict[str, None] = {}
        count = self.integer(low, high)
        while len(found) < count:
            found[self.word()] = None
        return list(found)

    def person(self) -> str:
        """A first name, known or invented."""
        return self.invented().capitalize() if self.chance(0.5) else self.value(PEOPLE)

    def full_name(self) -> str:
        """First and last name."""
        return f"{self.person()} {self.invented().capitalize()}"

    def city(self) -> str:
        """A city, known or invented."""
        return self.invented().capitalize() if self.chance(0.4) else self.value(CITIES)

    def number(self, low: int = 0, high: int = 9999) -> int:
        """A whole number of this side; small ones (below 20) are on both, there are too few of them."""
        while True:
            found = self.integer(low, high) if self.chance(0.5) else int(low + (high - low) * self.random.random() ** 3)
            if found < 20 or held_out(str(found)) == self.held:
                return found

    def decimal(self) -> float:
        """A number with one or two decimals, not zero in the last."""
        return self.value(
            lambda: float(f"{self.integer(0, 199)}.{self.pick(('5', '25', '75', '1', '3', '49', '99', '8'))}")
        )

    def code(self) -> str:
        """An alphanumeric identifier."""
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
        kinds = (
            lambda: f"{self.pick(letters)}{self.pick(letters)}-{self.integer(100, 99999)}",
            lambda: f"{self.pick(letters)}{self.integer(10, 9999)}",
            lambda: f"{self._syllables(1)}-{self.integer(1, 999)}",
            lambda: "".join(self.random.choices("abcdef0123456789", k=self.integer(4, 8))),
            lambda: "".join(self.random.choices(letters + "0123456789", k=self.integer(4, 7))),
        )
        return self.value(self.pick(kinds))

    def date(self) -> str:
        """A date as 2031-04-17."""
        return self.value(lambda: f"20{self.integer(10, 49)}-{self.integer(1, 12):02}-{self.integer(1, 28):02}")

    def time(self) -> str:
        """A time of day as 14:05."""
        return self.value(lambda: f"{self.integer(0, 23):02}:{self.pick((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}")

    def email(self) -> str:
        """A mail address under a name reserved for examples."""
        host = self.pick(("example.com", "example.org", "example.net"))
        return self.value(lambda: f"{self._syllables(2)}@{host}")

    def phrase(self) -> str:
        """Two to four words, such as a title."""
        text = self.value(lambda: " ".join(self.words(2, 4)))
        return text.capitalize() if self.chance(0.5) else text
