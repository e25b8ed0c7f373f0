"""The built-in model: its files, its template, its generators, and that training never sees the evaluation."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from phalanx.benchmarks.builtin_model import (
    data,
    draft_head,
    extract,
    facts,
    heldout,
    item,
    model,
    recall,
    story,
    talk,
    tasks,
    toolcalls,
    train,
)
from phalanx.benchmarks.builtin_model.words import Draw, Phrases, expansions, held_out, normal
from phalanx.launcher import builtin_model

from ..fields import each

CONFIG = json.loads((builtin_model.DIRECTORY / "config.json").read_text(encoding="utf-8"))
WEIGHTS = builtin_model.DIRECTORY / "model.safetensors"
MAKERS = [toolcalls.call, toolcalls.answer_result, extract.extract, talk.names, story.tell, facts.about, tasks.copy]


@pytest.fixture(scope="module")
def hf():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(builtin_model.DIRECTORY)


# --- files


def test_the_shape_keeps_to_its_limits_and_divides_by_many_ranks():
    assert sum(tensor.numel() for tensor in model.build().tensors().values()) <= 12_000_000
    for ranks in (1, 2, 3, 4, 6):
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            assert CONFIG[key] % ranks == 0
    assert CONFIG["max_position_embeddings"] == data.CONTEXT == 2048


def test_the_weights_have_the_shapes_of_the_config_in_bf16():
    with WEIGHTS.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    made = model.build().tensors() | draft_head.Head(CONFIG).tensors()
    shapes = {name: list(tensor.shape) for name, tensor in made.items()}
    assert {name: entry["shape"] for name, entry in header.items()} == shapes
    assert set(each(header.values(), "dtype")) == {"BF16"}


def test_all_files_together_stay_below_28_megabytes():
    names = subprocess.run(
        ["git", "ls-files", "."], cwd=builtin_model.DIRECTORY, capture_output=True, text=True
    ).stdout.split()
    assert {WEIGHTS.name, "MODEL_CARD.md"} <= set(names)
    assert sum((builtin_model.DIRECTORY / name).stat().st_size for name in names) <= 28_000_000


def test_the_card_has_every_figure():
    card = (builtin_model.DIRECTORY / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "@@" not in card
    results = Path(__file__).parents[2] / "benchmarks/results"
    result = json.loads((results / "demo-2026-11-22.json").read_text(encoding="utf-8"))
    for skill, least, _ in heldout.SKILLS:
        found = result["table"][skill]
        assert f"| {skill} | {least:.0%} | {found['right'] / found['of']:.0%}" in card
    assert f"{result['perplexity']['answers']:.4f}" in card and f"{result['perplexity']['tokens']:,}" in card


# --- tokenizer and template


def test_the_tokenizer_returns_every_text():
    tokenizer = data.tokenizer()
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    for text in ("Hello  World\n\n\tx", "naïve 漢字 🙂 ½", '{"a": [1, 2.5]}', "MARLO get_weather v1.2"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_word_has_the_same_tokens_wherever_it_stands():
    tokenizer = data.tokenizer()
    word = tokenizer.encode("flomarkin").tokens
    for text in ('"flomarkin"', " flomarkin ", "(flomarkin)", "\nflomarkin.", "x_flomarkin"):
        tokens = tokenizer.encode(text).tokens
        assert any(tokens[at : at + len(word)] == word for at in range(len(tokens)))


def test_special_tokens():
    tokenizer = data.tokenizer()
    assert tokenizer.token_to_id("<|im_end|>") == CONFIG["eos_token_id"] == 2
    for marker in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(tokenizer.encode(marker).ids) == 1
    # parsers look for these in the text, so decoding must not drop them
    assert tokenizer.decode(tokenizer.encode("<tool_call>x</tool_call><|im_end|>").ids) == "<tool_call>x</tool_call>"


def test_template_without_extras(hf):
    messages = [{"role": "user", "content": "Hi"}]
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_template_with_tools_calls_and_results(hf):
    tool = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}
    calls = [{"function": {"name": "f", "arguments": value}} for value in ({"a": "é"}, '{"a": 1}')]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Go"}]},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = hf.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert text.startswith(
        "<|im_start|>system\nBe kind.\n\nYou can call these functions:\n<tools>\n"
        + json.dumps(tool, ensure_ascii=False)
    )
    assert "<think>\nwhy\n</think>\n\n<tool_call>\n" in text
    first = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
    assert first + '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_template_drops_earlier_thoughts(hf):
    turn = {"role": "assistant", "content": "<think>\nold\n</think>\n\nYes"}
    messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]
    assert "old" not in hf.apply_chat_template(messages, tokenize=False)
    assert "old" in hf.apply_chat_template(messages[:2], tokenize=False)


@pytest.mark.parametrize("maker", MAKERS)
def test_training_text_is_what_the_template_renders(hf, maker):
    d = Draw("rendering")
    for think in (True, False) * 4:
        made = maker(d)
        options = dict(tokenize=False, add_generation_prompt=True, enable_thinking=think)
        rendered = hf.apply_chat_template(made.messages, tools=made.tools or None, **options)
        parts = item.pieces([made], think, dense=False)
        assert "".join(part for part, _ in parts).startswith(rendered)
        prompt = data.tokenizer().encode(rendered).ids
        split = [token for part, _ in parts for token in data.tokenizer().encode(part).ids]
        assert split[: len(prompt)] == prompt


# --- generators


def test_batches_are_the_same_every_time_and_learn_from_answers():
    first, again = data.batch("one", 16384), data.batch("one", 16384)
    for a, b in zip(first, again, strict=True):
        assert (a == b).all()
    ids, learn, ends = first
    assert (ids != data.batch("two", 16384)[0]).any()
    assert ends[-1] == len(ids) and max(ends[1:] - ends[:-1]) <= data.CONTEXT
    assert 0.1 < learn.mean() < 0.5


def test_batches_do_not_depend_on_the_order_of_sets():
    code = "from phalanx.benchmarks.builtin_model import data; print(data.batch('x', 16384)[0].sum())"
    run = [sys.executable, "-c", code]
    sums = {subprocess.check_output(run, env=os.environ | {"PYTHONHASHSEED": seed}) for seed in "123"}
    assert len(sums) == 1


@pytest.mark.parametrize("skill", [name for name, _, _ in heldout.SKILLS])
def test_every_exercise_accepts_its_own_answer(skill):
    first, again = heldout.items(skill, 20), heldout.items(skill, 20)
    assert [one.messages for one in first] == [one.messages for one in again]
    for one in first:
        _, content, calls = item.split_reply(f"<think>\n{one.thought}\n</think>\n\n{one.reply()}")
        assert item.judge(one, content, calls, ended=True)
        assert not item.judge(one, content, calls, ended=False)
        assert not item.judge(one, "", [], ended=True)


def test_extraction_is_asked_for_by_a_schema():
    for one in heldout.items("extract to JSON", 50):
        (schema,) = re.findall(r'\{"type": "object", "properties": \{.*?\}\}\}', one.messages[-1]["content"])
        assert list(json.loads(schema)["properties"]) == list(one.expect["json"])


def test_recall_is_placed_at_every_depth_of_1500_tokens():
    made = heldout.items("recall in 1500 tokens", 5)
    for index, one in enumerate(made):
        text = max((message["content"] for message in one.messages), key=len)
        assert 1400 < heldout.tokens_of(text) < 1900
        value = re.escape(one.expect["all"][0])
        places = [found.start() / len(text) for found in re.finditer(rf"(?<!\w){value}(?!\w)", text)]
        assert any(abs(place - index / 4) < 0.15 for place in places)


# --- the line between training and evaluation


@pytest.fixture(scope="module")
def trained():
    """Training exercises: many of each kind."""
    d = Draw("leak")
    makers = {maker for maker, _ in data.MIXTURE}
    return {maker.__name__: [maker(d) for _ in range(3000)] for maker in sorted(makers, key=lambda one: one.__name__)}


@pytest.mark.long
def test_no_question_of_the_evaluation_is_trained_on(trained):
    seen = {normal(one.messages[-1]["content"]) for made in trained.values() for one in made if not one.tools}
    for skill, _, _ in heldout.SKILLS:
        for one in heldout.items(skill, 60):
            if not one.tools:
                assert normal(one.messages[-1]["content"]) not in seen


@pytest.mark.long
def test_tools_and_arguments_of_the_evaluation_are_new(trained):
    def names(made):
        functions = [tool["function"] for one in made for tool in one.tools]
        return {f["name"].lower() for f in functions}, {
            name.lower() for f in functions for name in f["parameters"]["properties"]
        }

    made = heldout.items("one tool call", 200) + heldout.items("no call, answer after a result", 200)
    for new, old in zip(names(made), names(trained["call"]), strict=True):
        assert len(new) > 100 and not new & old
        assert all(held_out(name) for name in new) and not any(held_out(name) for name in old)


@pytest.mark.long
def test_the_training_run_has_nothing_of_the_evaluation(monkeypatch):
    """Twenty of the batches that train.py makes with its own seed, against all that evaluate.py asks by default."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    asked = train.arguments()
    questions, functions, documents = set(), [], 0
    for index in range(0, asked.steps, asked.steps // 20):
        d = Draw(f"train {asked.seed}/{index}")
        for place in range(320):
            text = "".join(part for part, _ in data.text(d))
            if not index and not place:
                ids = data.tokenizer().encode(text).ids
                assert train.work(f"train {asked.seed}", 16384, 0)[0][: len(ids)].tolist() == ids
            questions |= {normal(one) for one in re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.S)}
            if tools := re.search(r"<tools>\n(.*?)\n</tools>", text, re.S):
                functions += [json.loads(line)["function"] for line in tools[1].splitlines()]
            documents += 1
    assert documents >= 6400 and len(questions) > 9000 and len(functions) > 4000
    for skill, _, _ in heldout.SKILLS:
        for one in heldout.items(skill, 100):
            assert normal(one.messages[-1]["content"]) not in questions
    for function in functions:
        assert not [name for name in (function["name"], *function["parameters"]["properties"]) if held_out(name)]


def test_wordings_about_phalanx_are_new():
    d = Draw("wordings")
    seen = {normal(facts.about(d).messages[-1]["content"]) for _ in range(20000)}
    assert not seen & facts.held_wordings()
    for answer, keys, questions in facts.sections():
        assert questions.held and len(questions.train) >= 4, answer
        assert all(key.lower() in answer.lower() for key in keys)
    assert len(facts.sections()) >= 60


@pytest.mark.long
def test_sums_of_the_evaluation_are_new(trained):
    def pairs(made):
        return {tuple(sorted(re.findall(r"\d+", one.answer)[:2])) for one in made}

    assert not pairs(heldout.items("2-digit addition", 300)) & pairs(trained["add"])


@pytest.mark.parametrize(
    "module", [tasks, extract, toolcalls, recall, talk, story, facts], ids=lambda one: one.__name__
)
def test_training_never_says_a_held_out_wording(module):
    d = Draw("phrasings")
    for name, phrases in vars(module).items():
        if isinstance(phrases, Phrases) and phrases.held != phrases.train:
            said = {normal(d.wording(phrases)) for _ in range(2000)}
            assert not said & expansions(phrases.held), name


# --- run time


def test_run_time_imports_nothing_of_the_training():
    heavy = "('torch', 'transformers', 'numpy')"
    code = f"""import sys, phalanx.launcher.builtin_model as demo
demo.DIRECTORY, demo.SERVED_NAME
print([name for name in sys.modules if 'demo.' in name or name in {heavy}])"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_nothing_outside_imports_the_training():
    root = builtin_model.DIRECTORY.parent.parent
    pattern = re.compile(r"launcher\.demo\.|from \.+demo\.|demo import (data|train|check|model|words)")
    for folder in ("launcher", "rank", "comm", "kernels"):
        for file in (root / folder).rglob("*.py"):
            if builtin_model.DIRECTORY not in file.parents:
                assert not pattern.search(file.read_text(encoding="utf-8")), file
