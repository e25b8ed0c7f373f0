# ruff: noqa: E501
"""Small jobs on text: copy, reverse, sort, upper-case, count words, add."""

from __future__ import annotations

from .item import Item
from .words import Draw, Phrases

ASK = Phrases("""
{0}
{0}
{0}
[Please|Please, Phalanx,|Would you please|Would you|If you can,] {1}
[Could|Can|Will] you [|please|now|quickly|also] {1}
[I want|I need|I would like|I ask] you [to|now to|please to] {1}
[Hey|Hi|Hello there|Good morning|Ok|Well], {1}
[Now|Next,|Then|First,|And now] {1}
[A little task:|Task:|One more:|Here is a job.|Try this:|Do this:] {0}
* Kindly {1}
* {0}
* Hello, please {1}
""")


def ask(d: Draw, text: str) -> str:
    """A request, with or without a polite beginning."""
    if text.split()[0] in ("How", "What", "Number") or not text[0].isupper():
        return text
    return d.say(ASK).format(text, text[0].lower() + text[1:])


COPY = Phrases("""
[Repeat|Copy|Say|Write|Echo|Type|Print|Output] [this|the following|exactly this|the text|this text|these words|this line|this string] [exactly|word for word|once|once more|unchanged|]: {x}
Repeat after me: {x}
[Copy|Repeat|Write down|Reproduce] the [following|next] [text|line|words|characters] [without any change|exactly as it is|as they are|]: {x}
[Write|Say|Type|Give me] [this|that|the same] [again|back|one more time|once again]: {x}
[Repeat|Echo|Copy]: {x}
[Repeat|Copy|Echo|Say|Type] the [text|words|line|string] "{x}"
[Repeat|Copy|Say|Write] "{x}" [once|exactly|again|]
[Copy|Repeat|Echo|Reproduce] the [line|text|words] below.\\n{x}
Repeat the following line word for word.\\n{x}
Give this back to me [unchanged|as it is]: {x}
[Your answer should be|Answer with|Reply with|Respond with] [exactly|only|just|] this [text|line|]: {x}
* Repeat the following exactly: {x}
* Copy this line without change: {x}
* Say this text again: {x}
* Write the following text word for word: {x}
* Echo the text "{x}"
""")
REVERSE = Phrases("""
Reverse [the order of|] [these|the|the following|all these] [words|items|entries|things]: {x}
[Write|Put|List|Give|Say|Print] [these|the following|all these|the] [words|items|entries] [backwards|in reverse order|in reverse|from last to first|the other way round|in the opposite order]: {x}
[Turn|Flip] [the order of the words|the list|these words|this list] around: {x}
[Give|Show|Read|Tell] me [these words|this list|the words|the items] [from last to first|backwards|in reverse|from the end to the beginning]: {x}
Reverse [this|the|the following|this whole] [list|list of words|sequence|row|line]: {x}
[Read|Write|Print|Say] [this|the|the following] [list|sequence|line] [backwards|in reverse|from the end to the beginning|from last to first]: {x}
[Begin|Start] with the last word [and end with the first|and go to the first|]: {x}
Reverse the [list|words|line] below.\\n{x}
[Reverse|Invert] the [sequence|word order]: {x}
* Write the following words in reverse order: {x}
* Reverse the order of this list: {x}
* Put this list of words backwards: {x}
* Give me the list from last to first: {x}
""")
LETTERS = Phrases("""
Reverse [the letters of|the letters of the word|the word|the characters of] {x}
Reverse [the letters of|the letters of the word|the word|the characters of] "{x}"
[Spell|Write|Say|Type] [|the word|this word:] {x} [backwards|from the last letter to the first|from back to front]
[Spell|Write|Say|Type] [|the word|the letters of] "{x}" [backwards|from the last letter to the first|from back to front]
Turn the [letters|word|letters of the word] [of|] "{x}" around
[What is|Give me|Show me] [|the word] {x} [backwards|spelled backwards|with its letters reversed]
* Spell the word {x} backwards
* Write the letters of {x} in reverse
* Reverse the letters in "{x}"
""")
SORT = Phrases("""
Sort [these|the following|the|all these|my] {what} [|for me|please]: {x}
Sort [|them|this|this list|the list|these] {how}: {x}
[Put|Bring] [these|the|all] {what} [in|into] [order|{order}|the right order]: {x}
[Order|Arrange|Rank] [these|the|all|my] {what} {how}: {x}
[Order|Arrange|Organize] [this list|the list|everything|them] [in {order}|{how}]: {x}
[Write|List|Give|Show|Print] [these|the|all] {what} in {order}: {x}
[Write|List|Give me|Show|Print] [the list|them|everything] [sorted|sorted {how}|in {order}]: {x}
[Bring|Put] the [list|{what}|line] below into {order}.\\n{x}
Sort the [list|{what}|line] below {how}.\\n{x}
[These|The following] {what} should be [in {order}|sorted {how}]: {x}
* Sort these {what} {how}: {x}
* Put the following {what} in {order}: {x}
* Arrange the following list {how}: {x}
* Write this list in {order}: {x}
""")
UPPER = Phrases("""
[Write|Put|Type|Say|Print|Give me|Show] [this|these words|the words|the text|everything|that] in {case}: {x}
[Convert|Change|Turn|Transform] [this|these words|the words|the line|the text below|everything] [to|into] {case}: {x}
[Make|Set] [this|these words|it|the text] {case}: {x}
[Give|Show] me [this text|these words|this] in {case}: {x}
[Write|Type|Put|Say] the [words|text|line] "{x}" in {case}
[Convert|Change] "{x}" [to|into] {case}
{case} [please|]: {x}
[Write|Put|Repeat|Convert] the [line|text|words] below in {case}.\\n{x}
[Repeat|Copy] [this|the text|the line] in {case}: {x}
Use {case} for [this|these words|this text]: {x}
* Convert this text to {case}: {x}
* Write the following in {case}: {x}
* Change the text to {case}: {x}
* Put this in {case}: {x}
""")
CASES = Phrases("""
[upper case|uppercase|capital letters|capitals|all capitals|big letters|upper-case letters|uppercase letters|block capitals]
* [upper case|uppercase|capitals|capital letters]
""")
COUNT = Phrases("""
How many words [are|are there|stand] in [this text|this|the following|this sentence|the line]: {x}
How many words [does|has] [this|this sentence|the line] [have|got|contain]: {x}
Count [the words|all words|words] [|here|in this sentence|in the following text|in the following|for me]: {x}
[Tell me|Say|Give me] [the number of words|the word count] [in|of] [this|the line|the sentence|the following]: {x}
What is the [number of words|count of words] [here|in this|in this text]: {x}
[Number of words|Word count] [in|of] "{x}"?
How many words are [there|] in "{x}"?
Count the words [in|of] [|the text|the line] "{x}"
Count the words in the [line|text|sentence] below.\\n{x}
I need [a|the] word count [of|for] [this|the following]: {x}
{x}\\nHow many words [is that|are these|were these|are in this line]?
* How many words does this text have: {x}
* Count the words in this text: {x}
* Tell me how many words are in: {x}
* What is the word count of: {x}
""")
ADD = Phrases("""
[What is|What's|How much is|Calculate|Work out|Find|Solve|Please compute] {a} [+|plus|and] {b}?
{a} + {b}
{a} + {b} = [|?]
{a}+{b}
{a} plus {b}
[Add|Sum|Sum up] {a} [and|to|with] {b}.
[Calculate|Work out|Find|Evaluate] {a} + {b}.
What do [you|I|we] get if [you|I|we] add {a} [and|to] {b}?
[What is|Give me|Find] the [sum|total] of {a} and {b}.
[What|How much] is the [sum|total] of {a} [and|plus] {b}?
I have {a} [apples|books|coins|euros] and get {b} more. How many do I have?
[There are|We see] {a} [birds|cars|people] and {b} more [come|arrive]. How many are there?
* Compute {a} + {b}.
* Tell me the sum of {a} and {b}.
* How much do {a} and {b} make?
* Calculate {a} plus {b}.
* What does {a} + {b} make?
""")
SAID = Phrases(
    """
{n}
There are {n} words.
The text has {n} words.
That is {n} words.
""",
    shared=True,
)


def listed(d: Draw, low: int, high: int) -> tuple[list[str], str]:
    """Some words and what stands between them."""
    return d.value(lambda: "\0".join(d.words(low, high))).split("\0"), d.pick((" ", ", ", ", ", "\n"))


SYMBOLS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:;#%&+*=()<>@!?$"


def salad(d: Draw) -> str:
    """Something to copy, of any kind."""
    kind = d.integer(0, 6)
    if kind == 6:
        return " ".join("".join(d.random.choices(SYMBOLS, k=d.integer(2, 6))) for _ in range(d.integer(1, 6)))
    if kind == 0:
        return " ".join(d.pick((d.word, d.code, d.person, d.city))() for _ in range(d.integer(2, 7)))
    if kind == 1:
        return " ".join(str(d.number()) for _ in range(d.integer(2, 7)))
    if kind == 2:
        return ", ".join(d.words(2, 8))
    if kind == 3:
        return f"{d.person()} sees the {d.word()} {d.word()} in {d.city()}."
    if kind == 4:
        return d.pick((d.code, d.email, d.full_name, d.date, d.phrase))()
    return " ".join(d.words(2, 12))


def made(skill: str, question: str, answer: str, thought: str, **expect) -> Item:
    return Item(skill, [{"role": "user", "content": question}], answer, thought, expect=expect or {"equal": answer})


def copy(d: Draw) -> Item:
    text = d.value(lambda: salad(d))
    return made("copy", ask(d, d.say(COPY).replace("\\n", "\n").format(x=text)), text, "I copy the text.")


def reverse(d: Draw) -> Item:
    if d.chance(0.3):
        word = d.value(lambda: d.pick((d.invented, d.word))()[:9])
        letters, turned = " ".join(word), " ".join(reversed(word))
        question = ask(d, d.say(LETTERS, x=word)) + d.pick(("", "."))
        return made("reverse", question, word[::-1], f"The letters are {letters}. Backwards: {turned}.")
    words, gap = listed(d, 2, 7)
    question = ask(d, d.say(REVERSE).replace("\\n", "\n").format(x=gap.join(words)))
    return made("reverse", question, gap.join(reversed(words)), "I start with the last word.")


def sort(d: Draw) -> Item:
    words, gap = listed(d, 2, 7)
    if d.chance(0.3):
        numbers = sorted({d.number(0, 99 if d.chance(0.5) else 999) for _ in range(max(3, len(words)))})
        answer = gap.join(map(str, numbers))
        slots = dict(what="numbers", how=d.pick(("from small to large", "by size")), order="ascending order")
        words = [str(number) for number in d.some(numbers, len(numbers))]
        thought = "Smallest number first."
    else:
        slots = dict(what="words", how=d.pick(("alphabetically", "by the alphabet")), order="alphabetical order")
        answer = gap.join(sorted(words))
        thought = "By first letter: " + ", ".join(f"{' '.join(word[:3])} {word}" for word in sorted(words)) + "."
    question = d.say(SORT).replace("\\n", "\n").format(x=gap.join(words), **slots)
    return made("sort", ask(d, question), answer, thought)


def upper(d: Draw) -> Item:
    text = d.value(
        d.pick((lambda: " ".join(d.words(1, 5)), d.full_name, d.city, lambda: f"{d.person()} likes {d.word()}"))
    )
    lower = d.chance(0.12) and not d.held
    case, source, answer = ("lower case", text.upper(), text.lower()) if lower else (d.say(CASES), text, text.upper())
    question = d.say(UPPER).replace("\\n", "\n").format(x=source, case=case)
    return made("upper", ask(d, question), answer, "I change every letter.")


def count(d: Draw) -> Item:
    filler = ("the", "a", "and", "in")
    text = d.value(lambda: " ".join(d.word() if d.chance(0.9) else d.pick(filler) for _ in range(d.integer(1, 14))))
    words = text.split()
    if d.chance(0.3):
        words[0] = words[0].capitalize()
        words[-1] += "."
    thought = ", ".join(f"{place} {word.strip('.')}" for place, word in enumerate(words, 1)) + "."
    answer = str(len(words)) if len(words) == 1 else d.say(SAID, n=len(words))
    question = ask(d, d.say(COUNT).replace("\\n", "\n").format(x=" ".join(words)))
    return made("count", question, answer, thought, number=len(words))


def column(a: int, b: int) -> str:
    """The steps of a column addition."""
    steps: list[str] = []
    carry, place = 0, 1
    while place <= max(a, b) or carry and not steps:
        one, two = a // place % 10, b // place % 10
        total = one + two + carry
        with_carry = f" + {carry}" if carry else ""
        carry = total // 10
        steps.append(f"{one} + {two}{with_carry} = {total}" + (f", write {total % 10}, carry 1" if carry else ""))
        place *= 10
    return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def add(d: Draw) -> Item:
    """Two-digit sums; two numbers are held out in either order."""
    low, high = (10, 99) if d.held or d.chance(0.8) else d.pick(((1, 9), (1, 99), (100, 999)))
    pair = d.value(lambda: "+".join(sorted((str(d.integer(low, high)), str(d.integer(low, high))))))
    a, b = d.some([int(number) for number in pair.split("+")], 2)
    return made("add", d.say(ADD, a=a, b=b), f"{a} + {b} = {a + b}", column(a, b), number=a + b)
