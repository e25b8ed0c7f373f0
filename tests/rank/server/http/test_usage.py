"""What each key has used."""

import pytest

pytestmark = pytest.mark.timeout(30)


def used(front, key):
    headers = {"Authorization": f"Bearer {key}"}
    answer = front.request("GET", "/v1/usage", None, headers)
    assert answer.status == 200 and answer.body["since"] == front.state.started
    return tuple(answer.body[name] for name in ("requests", "prompt_tokens", "completion_tokens", "total_tokens"))


def test_each_key_has_its_own(make_front):
    front = make_front(api_keys=["a", "b"])

    def post(key, path, **body):
        return front.request("POST", f"/v1/{path}", body, {"X-Api-Key": key}).body

    assert used(front, "a") == used(front, "b") == (0, 0, 0, 0)
    chat = post("a", "chat/completions", messages="hi")["usage"]
    vectors = post("a", "embeddings", input=["hello", "x"])["usage"]["prompt_tokens"]
    prompt, completion = chat["prompt_tokens"] + vectors, chat["completion_tokens"]
    assert used(front, "a") == (2, prompt, completion, prompt + completion)
    assert post("b", "chat/completions", messages=5)["error"] and used(front, "b") == (0, 0, 0, 0)
    post("b", "responses", input="hi", background=True)
    front.wait(lambda: front.state.used[1].requests == 1)
    assert used(front, "b")[1] > 0 and front.request("GET", "/v1/usage").status == 401


def test_without_keys_everybody_counts(front):
    front.events("completions", prompt="x")
    assert front.request("GET", "/v1/usage").body["requests"] == 1
