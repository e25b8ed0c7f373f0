"""Tokenizers without a tokenizer.json: token ids are those of sentencepiece's own library, and of tiktoken's rule."""

import base64
import json
import random
import re
import warnings

import pytest
import sentencepiece
import tiktoken
from phalanx.rank.server.text import tokenizer_file
from phalanx.rank.server.text.load import Text
from phalanx.rank.server.text.tokenizer import ALPHABET, Tokenizer, detokenizer
from transformers import LlamaTokenizer

from ....checkpoints import CORPUS

pytestmark = pytest.mark.timeout(60)
TEXTS = [
    "The quick brown fox", " leading and  two  spaces ", "", " ", "a\n\tb\n\n", "Größe, naïve, Привет, мир! 你好",
    "🙂🚀 unseen 漢字 ☃", "def main(arguments): return 0123456789",
]  # fmt: skip
TYPES = {"bpe": dict(model_type="bpe"), "unigram": dict(model_type="unigram", vocab_size=420)}
KINDS = {
    "llama": dict(byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity"),
    "no prefix": dict(
        byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity", add_dummy_prefix=False,
    ),
    "normalised": dict(byte_fallback=True, normalization_rule_name="nmt_nfkc"),
    "control": dict(
        byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        control_symbols=["<pad>", "[INST]"], user_defined_symbols=["<|code|>"],
    ),
}  # fmt: skip


def train(directory, **options):
    directory.mkdir(exist_ok=True)
    corpus = directory / "corpus.txt"
    corpus.write_text(CORPUS)
    options = dict(vocab_size=500, model_type="bpe", character_coverage=0.995, num_threads=1) | options
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tokenizer"), minloglevel=2, hard_vocab_limit=False, **options
    )
    (directory / "tokenizer.vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def configure(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(tokenizer_file.find(directory))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type", TYPES)
def test_sentencepiece(tmp_path, type, kind):
    truth = train(tmp_path, **KINDS[kind], **TYPES[type])
    made = configure(tmp_path)
    assert made.size == truth.get_piece_size()
    words = CORPUS.split()
    draw = random.Random(0)
    texts = TEXTS + [" ".join(draw.choices(words, k=6)) for _ in range(30)]
    for text in texts:
        want = truth.encode(text)
        assert made.encode(text, False) == want, text
        assert made.encode(text, True) == [truth.bos_id(), *want]
        assert made.decode(want) == truth.decode(want)
        detok = detokenizer(made, frozenset(), [])
        spelt = "".join([detok.feed(id) for id in want] + [detok.finish()])
        assert spelt in (made.decode(want), " " + made.decode(want))  # texts continue a prompt: the space stays
    assert made.special == {i for i in range(truth.get_piece_size()) if truth.is_control(i) or truth.is_unknown(i)}


@pytest.mark.parametrize("legacy", [True, False])
def test_as_transformers_converts_it(tmp_path, legacy):
    train(tmp_path, **KINDS["llama"])
    made = configure(tmp_path, legacy=legacy, add_eos_token=True, bos_token="<s>", eos_token="</s>")
    theirs = LlamaTokenizer.from_pretrained(tmp_path, legacy=False, add_bos_token=True, add_eos_token=True)
    for text in TEXTS:
        if not (legacy and text.startswith(" ")):  # of which the new way makes one space less than sentencepiece
            assert made.encode(text, True) == theirs(text)["input_ids"], text
    # A space before the text behind a special token: of the old way alone.
    got = made.encode("<s>a", False)
    assert got == theirs("<s>a", add_special_tokens=False)["input_ids"] if not legacy else len(got) == 2
    assert made.piece(got[1]) == (b" a" if legacy else b"a")


def test_null_is_absent(tmp_path):
    train(tmp_path, **KINDS["llama"])
    texts = [*TEXTS, "<s>a"]
    plain = [configure(tmp_path).encode(text, True) for text in texts]
    nulls = configure(tmp_path, legacy=None, add_prefix_space=None)
    assert [nulls.encode(text, True) for text in texts] == plain


def test_tokens_that_are_added(tmp_path):
    truth = train(tmp_path, **KINDS["llama"])
    size = truth.get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": size + 1, "<|end|>": size}))
    decoder = {str(size + 2): {"content": "<fim>", "special": False}, "1": {"content": "<s>", "special": True}}
    ends = dict(add_bos_token=False, add_eos_token=True, eos_token={"content": "<|end|>"})
    made = configure(tmp_path, added_tokens_decoder=decoder, **ends)
    assert made.encode("<|user|>", True) == [size + 1, size]
    assert made.token_id("<fim>") == size + 2
    assert size + 2 not in made.special and {1, size, size + 1} <= made.special
    with pytest.raises(ValueError, match=f"'<far>' is token {size + 9}, .*{size + 2}"):
        configure(tmp_path, added_tokens_decoder={str(size + 9): {"content": "<far>"}})


@pytest.mark.parametrize("listed", [False, True])
def test_chatglm(tmp_path, listed):
    """Its code adds tokens, and begins texts with two of them; newer files list them."""
    truth = train(tmp_path, **KINDS["llama"])
    size = truth.get_piece_size()
    decoder = {str(size + 6): {"content": "<|user|>", "special": False}} if listed else {}
    made = configure(tmp_path, tokenizer_class="ChatGLMTokenizer", added_tokens_decoder=decoder)
    assert made.encode("The quick", True) == [size + 1, size + 3, *truth.encode("The quick")]
    assert made.encode("sophisticated", False) == truth.encode("sophisticated")
    assert made.encode("[gMASK]sop<|user|>", False) == [size + 1, size + 3, size + 6]
    assert made.encode("<|user|>", False) == [size + 6] and (size + 6 in made.special) is not listed
    assert made.size == size + 9


@pytest.mark.parametrize("keep", [0, 1, 7, 1000, -3])
def test_a_damaged_model(tmp_path, keep):
    train(tmp_path)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="tokenizer.model.*sentencepiece"):
        configure(tmp_path)


def test_a_model_of_words(tmp_path):
    train(tmp_path, model_type="word")
    with pytest.raises(ValueError, match="sentencepiece.*type 3"):
        configure(tmp_path)


def test_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json.*tekken.json.*bring"):
        tokenizer_file.find(tmp_path)


def test_a_tokenizer_json_goes_first(tmp_path, model_dir):
    for name in ("tokenizer.model", "tekken.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model_dir / "tokenizer.json").read_bytes())
        assert tokenizer_file.find(tmp_path).name == name


GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GLM4_ADDED = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
)  # fmt: skip


def glm4(directory, model_dir):
    """A tokenizer.model in tiktoken's format with the vocabulary of the byte-level tokenizer there; its ranks."""
    ranks = {token: rank - 30 for token, rank in tekken(directory, model_dir).items()}
    (directory / "tekken.json").unlink()
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (directory / "tokenizer.model").write_bytes(b"".join(lines))
    return ranks


@pytest.mark.parametrize("listed", [False, True])
def test_glm4(tmp_path, model_dir, listed):
    """Its code adds tokens, and begins texts with two of them; newer files list them."""
    ranks = glm4(tmp_path, model_dir)
    size = len(ranks)
    added = {str(size + i): {"content": token, "special": True} for i, token in enumerate(GLM4_ADDED)}
    made = configure(
        tmp_path, tokenizer_class="ChatGLM4Tokenizer", added_tokens_decoder=added if listed else {},
        eos_token="<|endoftext|>",
    )  # fmt: skip
    assert made.size == size + 14 and made.special == set(range(size, size + 14))
    assert [made.token_id(token) for token in GLM4_ADDED] == [*range(size, size + 14)]
    truth = tiktoken.Encoding(
        "glm4",
        pat_str=GLM4_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={name: made.token_id(name) for name in GLM4_ADDED},
    )
    quirks = ["It'S we'LL 1234567 12 ٣٤٥٦", "a\r\n\r\n  b!!\n\n", "  \n  x  ", "e\u0301 ' \u00a0y"]
    for text in [*TEXTS, *quirks, *CORPUS.splitlines()]:
        want = truth.encode_ordinary(text)
        assert made.encode(text, False) == want, text
        assert made.encode(text, True) == [size + 2, size + 4, *want]
        assert made.decode(want) == text
        detok = detokenizer(made, frozenset(), [])
        assert "".join([detok.feed(id) for id in want] + [detok.finish()]) == text
    chat = "[gMASK]<sop><|user|>\nHi<|assistant|>"
    assert made.encode(chat, False) == truth.encode(chat, allowed_special="all")


def test_a_tiktoken_file_of_another_model(tmp_path, model_dir):
    """A tokenizer of which nothing says where words end."""
    glm4(tmp_path, model_dir)
    for kind in ({}, {"tokenizer_class": "LlamaTokenizer"}):
        with pytest.raises(ValueError, match="tiktoken.*ChatGLM4Tokenizer"):
            configure(tmp_path, **kind)


@pytest.mark.parametrize("change, message", [
    (lambda data: data[: data.rindex(b" ") + 1], "tokenizer.model is not in tiktoken's format, or it is damaged"),
    (lambda data: data + b"IQ==\n", "tokenizer.model is not in tiktoken's format, or it is damaged"),
    (lambda data: data + data[:7], "tokenizer.model is damaged: its ranks are not all numbers from 0 on"),
    (lambda data: data.replace(b"AA== ", b"AAAA ", 1), "tokenizer.model is damaged: no token stands for the byte 0"),
])  # fmt: skip
def test_a_damaged_tiktoken_file(tmp_path, model_dir, change, message):
    glm4(tmp_path, model_dir)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        configure(tmp_path, tokenizer_class="ChatGLM4Tokenizer")


PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tekken(directory, model_dir, special=None):
    """A tekken.json with the vocabulary of the byte-level tokenizer there; its ranks by bytes."""
    data = json.loads((model_dir / "tokenizer.json").read_text())
    added = {token["content"] for token in data["added_tokens"]}
    tokens = [token for token in data["model"]["vocab"] if token not in added]
    tokens = [bytes(ALPHABET[char] for char in token) for token in sorted(tokens, key=data["model"]["vocab"].get)]
    single = [bytes([i]) for i in range(256)]
    ranks = {token: i for i, token in enumerate([*single, *(t for t in tokens if len(t) > 1)])}
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {"pattern": PATTERN, "default_vocab_size": 30 + len(ranks) - 5, "default_num_special_tokens": 30}
    (directory / "tekken.json").write_text(
        json.dumps({"config": config, "vocab": vocab} | ({"special_tokens": special} if special else {}))
    )
    return {token: 30 + rank for token, rank in ranks.items() if rank < len(ranks) - 5}


def by_ranks(ranks, word):
    """tiktoken's rule: the neighbours whose pair has the lowest rank become one, as long as there are any."""
    if word in ranks:
        return [ranks[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
        rank, at = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("listed", [False, True])
def test_tekken(tmp_path, model_dir, listed):
    special = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}, {"rank": 7, "token_str": "[THINK]"}]
    ranks = tekken(tmp_path, model_dir, special if listed else None)
    made = Tokenizer(tokenizer_file.find(tmp_path))
    assert made.size == 30 + len(ranks)
    assert made.token_id("[THINK]" if listed else "[AVAILABLE_TOOLS]") == (7 if listed else 5)
    assert made.token_id("<SPECIAL_29>") == 29 and made.special == set(range(30))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pattern = re.compile(PATTERN.replace(r"\p{L}", r"[^\W\d_]").replace(r"[^\r\n[^\W\d_]\p{N}]", r"(?:[^\r\n\w]|_)")
                             .replace(r"[^\s[^\W\d_]\p{N}]", r"(?:[^\s\w]|_)").replace(r"\p{N}", r"\d"))  # fmt: skip
    for text in [*TEXTS, *CORPUS.splitlines()]:
        words = pattern.findall(text)
        assert "".join(words) == text
        want = [id for word in words for id in by_ranks(ranks, word.encode())]
        assert made.encode(text, False) == want and made.encode(text, True) == [1, *want]
        assert made.decode(want) == text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {"pattern": "."}, "vocab": []}', "[" * 100_000])
def test_a_damaged_tekken(tmp_path, text):
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(ValueError, match="tekken.json.*damaged"):
        Tokenizer(tokenizer_file.find(tmp_path))


def test_tekken_alone(tmp_path, model_dir):
    """No other file names its first and last token, or its template."""
    tekken(tmp_path, model_dir)
    text = Text(str(tmp_path))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert text.template.family.family == "Mistral, tekken" and text.end_tokens == (2,)
    assert text.template.render(messages) == "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]u[/INST]"
    (tmp_path / "tekken.json").write_text("[]")
    with pytest.raises(ValueError, match="tekken.json.*damaged"):
        Text(str(tmp_path))


@pytest.mark.parametrize("decoder", ["as it is", "Metaspace"])
def test_grammars_see_the_same_bytes(tmp_path, decoder):
    """llguidance's view of the tokenizer that rank 0 is sent."""
    llguidance = pytest.importorskip("llguidance")
    train(tmp_path, **KINDS["llama"])
    made = configure(tmp_path)
    if decoder == "Metaspace":
        data = json.loads(made.to_json()) | {"decoder": {"type": "Metaspace", "replacement": "▁", "split": True}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        made = configure(tmp_path)
    seen = llguidance.LLTokenizer(made.to_json(), n_vocab=made.size, eos_token=[2])
    for id in range(made.size):
        # No UTF-8 has a byte 255. A Metaspace decoder knows no tokens of bytes.
        if id not in made.added.values() and made.piece(id) != b"\xff" and not made.piece(id).startswith(b"<0x"):
            assert seen.decode_bytes([id]) == made.piece(id), made.piece(id)
    text = " The fox and the hounds, " + TEXTS[5]
    matcher = llguidance.LLMatcher(seen, llguidance.LLMatcher.grammar_from_lark("start: /(?s:.*)/"))
    tokens = made.encode(text, False)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
