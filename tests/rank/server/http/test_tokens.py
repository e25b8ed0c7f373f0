"""/tokenize, /detokenize, /apply-template."""

import pytest
from phalanx.rank.server.http.tokens import TokenizeRequest

from ....fields import each

pytestmark = pytest.mark.timeout(30)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def post(server, path, **body):
    answer = server.request("POST", path, body)
    return answer.body if answer.status == 200 else (answer.status, answer.body["error"]["message"])


def test_texts_and_back(server):
    found = post(server, "/tokenize", prompt="hello world", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert "".join(found["token_strs"]) == "hello world"
    assert post(server, "/v1/tokenize", content="hello world")["tokens"] == found["tokens"]
    assert post(server, "/detokenize", tokens=found["tokens"]) == {"prompt": "hello world", "content": "hello world"}


def test_texts_as_llama_cpp_has_them(server):
    found = post(server, "/tokenize", content="hi 🙂", with_pieces=True)["tokens"]
    pieces = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in found]
    assert b"".join(pieces).decode() == "hi 🙂" and any(isinstance(one["piece"], list) for one in found)
    assert each(found, "id") == post(server, "/tokenize", content="hi 🙂")["tokens"]
    sent = ({"content": "x"}, {"content": "x", "add_special": True}, {"prompt": "x"}, {"content": ""})
    meant = [TokenizeRequest(**body).meant().add_special_tokens for body in sent]
    assert meant == [False, True, None, False]


def test_conversations(server):
    body = {"messages": [{"role": "user", "content": "hi <|end|>"}], "add_generation_prompt": False}
    found = post(server, "/tokenize", **body)
    written = post(server, "/apply-template", **body)["prompt"]
    assert written == "<|turn|>user\nhi <|end|><|end|>\n"
    assert post(server, "/detokenize", tokens=found["tokens"])["content"] == written


def test_how_many_tokens_a_chat_has(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL]}
    counted = post(server, "/v1/chat/completions/input_tokens", **body)
    made = server.post("chat/completions", **body).body
    assert counted == {"object": "response.input_tokens", "input_tokens": made["usage"]["prompt_tokens"]}
    assert post(server, "/chat/completions/input_tokens", **body) == counted
    assert post(server, "/v1/chat/completions/input_tokens", messages=[])[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "none of them given: send one of prompt, content, messages"),
        ("/tokenize", {"prompt": "a", "messages": "b"}, "prompt and messages given: send one of"),
        ("/tokenize", {"messages": [{"role": "king"}]}, 'messages[0].role is "king"'),
        ("/tokenize", {"content": "a", "parse_special": False}, "control tokens in a text are always taken as such"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [1, 400]}, "tokens holds token id 400: this model's tokens are 0 to 399"),
        ("/apply-template", {"messages": []}, "messages is an empty list"),
    ],
)
def test_refusals(server, path, body, words):
    status, message = post(server, path, **body)
    assert status == 400 and words in message


def test_a_text_that_is_too_long(server):
    assert "context is 512 tokens" in post(server, "/tokenize", prompt="word " * 4000)[1]
