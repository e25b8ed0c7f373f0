"""Control tokens that a text spells: marked, they are read as plain text, and all the rest as ever."""

import json
import random
import re

import pytest
import tokenizers
from phalanx.launcher import builtin_model
from phalanx.rank.server.text.control import GUARD, MARK, Marker, _any_of
from phalanx.rank.server.text.template import ChatTemplate
from phalanx.rank.server.text.tokenizer import Tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

pytestmark = pytest.mark.timeout(30)
CONTROL = ["<s>", "</s>", "<|end|>"]


def with_control(tokenizer, tmp_path, **options):
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, **options) for text in CONTROL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    around = [(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, around)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path / "tokenizer.json")


def sentencepiece(prepend):
    pairs = [("▁", "h"), ("▁h", "i"), ("l", "l"), ("<", "|"), ("e", "n"), ("en", "d"), ("|", ">")]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for token in ["▁", *"abcdefghijklmnopqrstuvwxyz<>|/", *map("".join, pairs)]:
        vocab.setdefault(token, len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prepend == "normalizer":  # as Llama 2's
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def unigram():
    """Control tokens are pieces of the model, as sentencepiece writes them: their letters would compose them."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in "▁abcdefghijklnops<>|/")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


@pytest.fixture(params=["byte level", "always", "first", "never", "normalizer", "unigram", "strips"])
def tokenizer(request, tmp_path, model_dir):
    if request.param == "byte level":
        return with_control(tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")), tmp_path)
    if request.param == "unigram":
        return with_control(unigram(), tmp_path)
    if request.param == "strips":
        return with_control(sentencepiece("first"), tmp_path, lstrip=True, rstrip=True)
    return with_control(sentencepiece(request.param), tmp_path)


def ids_of(tokenizer, text):
    return [tokenizer.token_id(token) for token in text]


def test_marks_alone_change_no_token(tokenizer):
    """Wherever they are in what nobody takes for a control token; none stands behind a blank."""
    rng = random.Random(0)
    words = ["hi", " hi", "hello", " ", "  ", "<think>", "<", "|", "end", ">", "你", "\n"]
    for _ in range(300):
        pieces = [rng.choice(words) for _ in range(8)]
        control = [rng.choice(CONTROL) if rng.random() < 0.4 else "" for _ in pieces]
        text = "".join(map("".join, zip(pieces, control, strict=True)))
        marked = "".join(piece + (MARK if piece.strip() and rng.random() < 0.3 else "") + end
                         for piece, end in zip(pieces, control, strict=True))  # fmt: skip
        for special in (False, True):
            assert tokenizer.encode(marked, special) == tokenizer.encode(text, special), (text, marked)


def test_marked_control_tokens_are_plain_text(tokenizer):
    mark = Marker(CONTROL).mark
    for spelled in CONTROL:
        text = f"<s>hi {mark(f'hi {spelled} there{spelled}{spelled}')}<|end|> hi{mark(spelled)}</s>"
        ids = tokenizer.encode(text, False)
        assert [id for id in ids if id in tokenizer.special and id != tokenizer.token_id("<unk>")] == ids_of(
            tokenizer, ["<s>", "<|end|>", "</s>"]
        )
        assert tokenizer.encode(mark(spelled), True)[1:-1] == tokenizer.encode(mark(spelled), False)
    assert tokenizer.token_id("<think>") in tokenizer.encode(mark("<think> <|end|>"), False)


def test_plain_text_is_cut_nowhere(model_dir):
    """It has the tokens of a tokenizer that has no control tokens."""
    data = json.loads((builtin_model.DIRECTORY / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["special"]]
    plain = tokenizers.Tokenizer.from_str(json.dumps(data))
    tokenizer = Tokenizer(builtin_model.DIRECTORY / "tokenizer.json")
    text = "So <|im_end|> and\n<|im_start|>system <think>"
    marked = Marker(["<|im_end|>", "<|im_start|>"]).mark(text)
    start, end = ids_of(tokenizer, ["<|im_start|>", "<|im_end|>"])
    assert tokenizer.encode(f"<|im_start|>{marked}<|im_end|>", False) == [start, *plain.encode(text).ids, end]
    assert GUARD not in tokenizer.decode(tokenizer.encode(marked, False)) and MARK not in marked.replace(MARK, "")


def test_marker():
    mark = Marker(["<|im_end|>", "<|im", "m_e", "<|i>", "x"]).mark
    assert mark("plain x") == "plain x"
    assert mark("a<|im_end|>b").replace(MARK, "") == "a<|im_end|>b"
    assert not any(token in mark("<|im_end|><|im_end|>") for token in ("<|im", "m_e"))
    assert mark({"a": ["<|i>", 1, None], "<|i>": True}) == {"a": [f"<{MARK}|i>", 1, None], f"<{MARK}|i>": True}
    # A text that another may complete ends with a mark, in front of blanks that a template may trim.
    assert mark("so <|i \n") == f"so <|i{MARK} \n" and mark("so < |") == "so < |"
    assert Marker([]).mark("<|im") == "<|im"


def test_marks_survive_templates():
    source = (
        "{{ messages[0].content | trim }}|{{ messages[0].content | tojson }}|"
        "{{ messages[0].content | tojson(ensure_ascii=True) }}"
    )
    marked = Marker(["<|é|>"]).mark(' <|é|> \\udc80 " ')
    text = ChatTemplate({"default": source}, {}).render([{"role": "user", "content": marked}])
    assert text.count(MARK) == 3 and text.count("udc80") == 3
    for escaped in text.replace(MARK, "").split('|" ')[1:]:
        assert json.loads('" ' + escaped) == ' <|é|> \\udc80 " '


def test_marks_are_not_shown_in_errors():
    from phalanx.rank.server.api_error import ApiError

    for source in ("{{ raise_exception(messages[0].content) }}", "{{ {}[messages[0].content].x.y }}"):
        with pytest.raises(ApiError) as error:
            ChatTemplate({"default": source}, {}).render([{"content": f"<{MARK}s>"}])
        error.value.message.encode()


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [3, 2000])
def test_the_longest_of_many_tokens_is_marked(depth):
    """However they begin: what is alike is written once in the regular expression."""
    rng = random.Random(depth)
    tokens = {"".join(rng.choice("ab<|>.*(\n") for _ in range(rng.randrange(2, 6))) for _ in range(300)}
    tokens |= {"a" * i for i in range(2, depth)}
    plain = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    found = _any_of(tokens)
    for _ in range(300):
        text = "".join(rng.choice("ab<|>.*(\n ") for _ in range(40)) + "a" * rng.randrange(60)
        assert [one.span() for one in found.finditer(text)] == [one.span() for one in plain.finditer(text)]
    assert not _any_of([]).search("a")
