"""/v1/rerank and /v1/score, by embeddings and by a reranker's yes and no."""

import json
import math

import pytest
from phalanx.rank import protocol
from phalanx.rank.server.http.rerank import RerankRequest

from ....fields import each
from ..conftest import make_model

pytestmark = pytest.mark.timeout(30)
DOCUMENTS = ["a", "hello world, how are you? I am fine.", "the quick brown fox"]


def cosine(server, a, b):
    """The order of FakeScheduler's answers: [tokens, 3, 0, 4]."""
    a, b = ([len(server.scheduler.encode(text)), 3.0, 0.0, 4.0] for text in (a, b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_scores_are_cosines(server):
    answer = server.post("score", text_1="hello", text_2=DOCUMENTS).body
    expected = [cosine(server, "hello", text) for text in DOCUMENTS]
    assert each(answer["data"], "score") == pytest.approx(expected, abs=1e-6)
    assert each(answer["data"], "index") == [0, 1, 2]
    assert answer["object"] == "list"
    pairs = server.post("score", text_1=["hello", "a"], text_2=["hello", "the"]).body["data"]
    assert each(pairs, "score") == pytest.approx([1.0, cosine(server, "a", "the")], abs=1e-6)


def test_the_best_come_first(server):
    body = {"query": "hello", "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]}
    answer = server.post("rerank", **body).body
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == sorted(found, reverse=True) and answer["usage"]["total_tokens"] > 3
    assert all(one["document"]["text"] == DOCUMENTS[one["index"]] for one in answer["results"])
    for path in ("/rerank", "/v2/rerank"):
        short = server.request("POST", path, {**body, "top_n": 1, "return_documents": False}).body["results"]
        assert short == [{key: answer["results"][0][key] for key in ("index", "relevance_score")}]


def test_the_texts_are_listed_as_often_for_many_documents(server, monkeypatch):
    counts, texts = [], RerankRequest.texts
    monkeypatch.setattr(RerankRequest, "texts", lambda self: counts.append(1) or texts(self))
    asked = []
    for count in (1, 20):
        counts.clear()
        assert server.post("rerank", query="q", documents=["a"] * count).status == 200
        asked.append(len(counts))
    assert asked[0] == asked[1]


@pytest.fixture
def reranker(start_server, tmp_path):
    """A model with tokens for yes and no."""
    model = make_model(tmp_path / "Some-Reranker")
    data = json.loads((model / "tokenizer.json").read_text())
    size = len(data["model"]["vocab"])
    token = {**data["added_tokens"][0], "special": False}
    data["added_tokens"] += [{**token, "id": size + i, "content": word} for i, word in enumerate(("yes", "no"))]
    (model / "tokenizer.json").write_text(json.dumps(data))
    server = start_server(model=model)
    server.ids = {word: size + i for i, word in enumerate(("yes", "no"))}
    return server


def test_a_reranker_is_asked(reranker, monkeypatch):
    yes, no = reranker.ids["yes"], reranker.ids["no"]
    tops = iter([[(yes, math.log(0.6)), (no, math.log(0.2))], [(no, -0.1)], [(5, -0.1)]])
    original = protocol.TokenLogprob
    monkeypatch.setattr(protocol, "TokenLogprob", lambda token, value, top: original(7, -9.0, next(tops)))
    answer = reranker.post("rerank", query="q <|end|>", documents=["a", "b", "c"], instruction="be strict").body
    assert {one["index"]: one["relevance_score"] for one in answer["results"]} == pytest.approx({0: 0.75, 1: 0, 2: 0})
    (first, *_) = reranker.scheduler.requests
    prompt = reranker.engine.text.tokenizer.decode(memoryview(first.tokens).cast("I").tolist())
    assert "<Instruct>: be strict\n<Query>: q <|end|>\n<Document>: a" in prompt
    assert prompt.endswith("</think>\n\n")
    assert reranker.engine.text.tokenizer.added["<|end|>"] not in memoryview(first.tokens).cast("I").tolist()
    assert (first.sampling.max_tokens, first.sampling.logprobs) == (1, 20)


def test_a_reranker_without_the_words(start_server, tmp_path):
    server = start_server(model=make_model(tmp_path / "reranker"))
    answer = server.post("rerank", query="q", documents=["a"])
    assert answer.status == 400 and "tokens for yes" in answer.body["error"]["message"]


def test_a_pair_that_is_too_long_for_a_reranker(reranker):
    answer = reranker.post("rerank", query="q", documents=["word " * 140])
    assert answer.status == 400 and "512; shorten" in answer.body["error"]["message"]


def test_both_names_of_what_is_scored(reranker):
    same = reranker.post("score", text_1="a", text_2=["b", "cc"]).body["data"]
    assert reranker.post("score", queries="a", documents=["b", "cc"]).body["data"] == same and len(same) == 2


@pytest.mark.parametrize("long", ["query", "documents", "instruction"])
def test_what_cannot_fit_is_not_tokenised(reranker, long):
    text = "word " * 3000
    body = {"query": "q", "documents": ["a"], long: [text] if long == "documents" else text}
    answer = reranker.post("rerank", **body)
    assert answer.status == 400 and "it has 15000 characters" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("rerank", {"query": "q"}, "documents is missing"),
        ("rerank", {"query": "q", "documents": []}, "documents is an empty list"),
        ("rerank", {"query": "q", "documents": [{"title": "x"}]}, 'expected a text, or an object with "text"'),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n is 0: it must be between 1"),
        ("rerank", {"query": "q", "documents": ["a"] * 2049}, "2049 pairs of texts: at most 2048"),
        ("rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 5}, "prompts are not cut"),
        ("rerank", {"query": "", "documents": ["a"]}, "input is empty"),
        ("score", {"text_1": "a"}, "text_2 is missing"),
        ("score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1 and queries are two names"),
        ("score", {"queries": ["a", "b"], "documents": ["c"]}, "queries has 2 texts and documents 1"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 1"),
        ("score", {"text_1": "a", "text_2": []}, "text_1 has 1 texts and text_2 0"),
    ],
)
def test_refusals(server, path, body, words):
    answer = server.post(path, **body)
    assert answer.status == 400 and words in answer.body["error"]["message"]
