"""Which models mark their thoughts in which way."""

import pytest
from phalanx.rank.server.text import reasoning

MODELS = [
    ("granite", "Write the thoughts after 'Here is my thought process:'", ()),
    ("granite33", "within <think></think> and <response></response>", ()),
    ("harmony", "<|channel|>analysis<|message|>", ("<|channel|>",)),
    ("minimax_m3", "<mm:think></mm:think>", ()),
    ("mistral", "[/THINK]", ()),
    ("mistral", "", ("[THINK]", "[/THINK]")),
    ("seed", "</seed:think>", ()),
    ("think", "content.split('</think>')", ()),
    ("think", "", ("<think>", "</think>")),
    ("thought", "</thought>", ()),
]


@pytest.mark.parametrize(("name", "template", "added"), MODELS)
def test_the_format_of_a_model(name, template, added):
    assert [one for one in reasoning.names() if reasoning.find(one).matches(template, added)] == [name]
    assert reasoning.choose(template, added) is reasoning.find(name)


def test_every_format_has_a_model():
    assert {name for name, *_ in MODELS} == {*reasoning.names()}
    assert reasoning.choose("plain", ("<think>",)) is None


def test_whether_a_text_ends_within_thoughts():
    think = reasoning.find("think")
    assert think.opened("a <think> b") and think.opened("<think>a</think><think>")
    assert not think.opened("") and not think.opened("<think></think>b")
