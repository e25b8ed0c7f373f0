"""The held-out exercises and the held-out text for perplexity: from the other side of the line than all training.

python -m phalanx.benchmarks.builtin_model.heldout --perplexity FILE   tokens as JSON lines, for other formats
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from . import data, extract, facts, recall, talk, tasks, toolcalls
from .item import Item
from .words import Draw

SCHEMA = '{"type": "object", "properties": '
# skill, share that must be right, makers
SKILLS = [
    ("one tool call", 0.90, (toolcalls.call,)),
    ("no call, answer after a result", 0.90, (toolcalls.none_fits, toolcalls.answer_result)),
    ("copy", 0.85, (tasks.copy,)),
    ("reverse", 0.85, (tasks.reverse,)),
    ("sort", 0.85, (tasks.sort,)),
    ("upper-case", 0.85, (tasks.upper,)),
    ("count words", 0.85, (tasks.count,)),
    ("2-digit addition", 0.85, (tasks.add,)),
    ("extract to JSON", 0.85, (extract.extract,)),
    ("recall in 1500 tokens", 0.90, ()),
    ("questions about Phalanx", 0.90, ()),
    ("small talk ends by itself", 0.90, (talk.chat,)),
]


def tokens_of(text: str) -> int:
    return len(data.tokenizer().encode(text).ids)


def items(skill: str, count: int, seed: str = "evaluation") -> list[Item]:
    """`count` held-out exercises of a skill, always the same ones for the same seed."""
    d = Draw(f"{seed}/{skill}", held=True)
    if skill == "questions about Phalanx":
        known = len(facts.sections())
        return [facts.about(d, index % known) for index in range(count)]
    if skill == "recall in 1500 tokens":
        # depths run evenly from the beginning to the end
        return [recall.recall(d, 1500, tokens_of, index / max(1, count - 1)) for index in range(count)]
    if skill == "extract to JSON":
        # only those that give a schema; training also has texts with the names of the fields alone
        drawn = (extract.extract(d) for _ in itertools.count())
        return list(itertools.islice((item for item in drawn if SCHEMA in item.messages[-1]["content"]), count))
    makers = next(makers for name, _, makers in SKILLS if name == skill)
    return [makers[index % len(makers)](d) for index in range(count)]


def documents(count: int = 400, seed: str = "perplexity") -> list[tuple[list[int], list[bool]]]:
    """Held-out conversations as tokens, and which tokens belong to answers: the text that perplexity is measured on."""
    return data.documents(Draw(seed, held=True), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perplexity", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=400, help="documents; the card's figures are for 400")
    args = parser.parse_args()
    with args.perplexity.open("w", encoding="utf-8") as out:
        for ids, learn in documents(args.count):
            out.write(json.dumps({"tokens": ids, "answer": [int(one) for one in learn]}) + "\n")


if __name__ == "__main__":
    main()
