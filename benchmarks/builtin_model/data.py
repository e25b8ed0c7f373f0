"""The mixture that the model is trained on: conversations of one side of the line, packed into batches of tokens."""

from __future__ import annotations

from functools import cache

import numpy as np
from tokenizers import Tokenizer

from ...launcher.builtin_model import DIRECTORY
from . import extract, facts, recall, story, talk, tasks, toolcalls
from .item import Item, pieces
from .words import Draw

CONTEXT = 2048
MOST = 1024  # documents in a batch
# exercise, share of the conversations
MIXTURE = [
    (toolcalls.call, 27), (toolcalls.none_fits, 5), (toolcalls.answer_result, 5),
    (tasks.copy, 4), (tasks.reverse, 6), (tasks.sort, 9), (tasks.upper, 5), (tasks.count, 3), (tasks.add, 4),
    (extract.extract, 15), (facts.about, 22), (talk.chat, 12), (talk.names, 2), (story.tell, 2),
]  # fmt: skip
MAKERS = [maker for maker, share in MIXTURE for _ in range(share)]
SHORT = (tasks.copy, tasks.reverse, tasks.sort, tasks.upper, tasks.count, tasks.add, facts.about, talk.chat, talk.names)


def conversation(d: Draw) -> tuple[list[Item], bool]:
    """Exercises that follow each other in one conversation, and whether every answer in it is learned."""
    roll = d.random.random()
    if roll < 0.10:
        return recall.recalls(d, d.integer(40, 700), d.integer(1, 5)), True
    if roll < 0.18:
        return recall.recalls(d, d.integer(900, 1650), d.integer(2, 7)), True
    if roll < 0.25:
        items = [d.pick(SHORT)(d) for _ in range(d.integer(2, 4))]
        return items, d.chance(0.7)
    item = d.pick(MAKERS)(d)
    if item.skill in ("chat", "facts", "names", "copy", "sort", "story") and d.chance(0.15):
        item.tools = toolcalls.random_tools(d)
    return [item], True


def text(d: Draw) -> list[tuple[str, bool]]:
    """One document: a conversation, or a plain story as a completion would go on with."""
    if d.chance(0.02):
        return [(story.story(d, low=4, high=14), True), ("<|endoftext|>", True)]
    items, dense = conversation(d)
    return pieces(items, think=d.chance(0.6), dense=dense)


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of the built-in model."""
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def documents(d: Draw, count: int) -> list[tuple[list[int], list[bool]]]:
    """`count` documents as token ids, and for each id whether the model learns to write it."""
    texts = [text(d) for _ in range(count)]
    encoded = iter(tokenizer().encode_batch_fast([part for parts in texts for part, _ in parts]))
    found = []
    for parts in texts:
        ids: list[int] = []
        learn: list[bool] = []
        for _, wanted in parts:
            more = next(encoded).ids
            ids += more
            learn += [wanted] * len(more)
        if len(ids) <= CONTEXT:
            found.append((ids, learn))
    return found


def batch(seed: str, size: int, held: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`size` tokens of whole documents: ids, which of them are learned, where each document ends.

    The rest after the last document is filled with padding, as a document of its own that nothing is learned from.
    """
    d = Draw(seed, held)
    ids = np.zeros(size, np.uint16)
    learn = np.zeros(size, np.uint8)
    ends: list[int] = []
    at = 0
    while at < size:
        for document, wanted in documents(d, 32):
            end = at + len(document)
            if end > size or len(ends) == MOST - 1 - size // CONTEXT:
                ends += list(range(min(at + CONTEXT, size), size, CONTEXT)) + [size]
                return ids, learn, np.array(ends, np.int32)
            ids[at:end], learn[at:end] = document, wanted
            ends.append(end)
            at = end
    return ids, learn, np.array(ends, np.int32)


def plain_texts(seed: str, count: int):
    """Documents as text, for training the tokenizer: more of the talk, whose words should be whole tokens."""
    d = Draw(seed)
    for _ in range(count):
        yield "".join(part for part, _ in text(d))
        for maker in (facts.about, facts.about, talk.chat, story.tell):
            yield "".join(part for part, _ in pieces([maker(d)], think=True, dense=False))
