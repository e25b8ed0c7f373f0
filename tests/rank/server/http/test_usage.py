"""What each key has used."""

import http.client
import json

import pytest

pytestmark = pytest.mark.timeout(30)


def used(fresh_server, key):
    headers = {"Authorization": f"Bearer {key}"}
    answer = fresh_server.request("GET", "/v1/usage", None, headers)
    assert answer.status == 200 and answer.body["since"] == fresh_server.state.started
    return tuple(answer.body[name] for name in ("requests", "prompt_tokens", "completion_tokens", "total_tokens"))


def test_each_key_has_its_own(start_server):
    server = start_server(api_keys=["a", "b"], key_names={"b": "ben"})

    def post(key, path, **body):
        return server.request("POST", f"/v1/{path}", body, {"X-Api-Key": key}).body

    assert used(server, "a") == used(server, "b") == (0, 0, 0, 0)
    chat = post("a", "chat/completions", messages="hi")["usage"]
    vectors = post("a", "embeddings", input=["hello", "x"])["usage"]["prompt_tokens"]
    prompt, completion = chat["prompt_tokens"] + vectors, chat["completion_tokens"]
    assert used(server, "a") == (2, prompt, completion, prompt + completion)
    assert post("b", "chat/completions", messages=5)["error"] and used(server, "b") == (0, 0, 0, 0)
    post("b", "responses", input="hi", background=True)
    server.wait(lambda: server.state.used[1].requests == 1)
    names = [server.request("GET", "/v1/usage", None, {"X-Api-Key": key}).body["name"] for key in "ab"]
    assert names == [None, "ben"]
    assert used(server, "b")[1] > 0 and server.request("GET", "/v1/usage").status == 401


def test_without_keys_everybody_counts(fresh_server):
    fresh_server.events("completions", prompt="x")
    assert fresh_server.request("GET", "/v1/usage").body["requests"] == 1


def test_open_requests_of_a_key_are_limited(start_server):
    server = start_server(api_keys=["a", "b"], requests_per_key=2, scheduler={"pause": 0.2})
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200})

    def ask(key):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/v1/completions", body, {"X-Api-Key": key})
        return connection, connection.getresponse()

    running = [ask("a"), ask("a"), ask("b")]
    assert [answer.status for _, answer in running] == [200, 200, 200]
    connection, answer = ask("a")
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    assert json.loads(answer.read())["error"]["message"] == (
        "this API key has 2 requests open and may have 2 (--requests-per-key): wait for one"
    )
    running[0][0].sock.close()  # the client leaves
    running[0][1].close()
    server.wait(lambda: server.state.used[0].open == 1)
    running.append(ask("a"))
    assert running[-1][1].status == 200
    for one, answer in (*running, (connection, None)):
        if answer is not None:
            answer.close()
        one.close()
    server.wait(lambda: [used.open for used in server.state.used] == [0, 0])


def test_a_response_in_the_background_is_an_open_request(start_server):
    server = start_server(api_keys=["a"], requests_per_key=2, scheduler={"hold": True})

    def begin():
        body = {"input": "hi", "background": True}
        answer = server.request("POST", "/v1/responses", body, {"X-Api-Key": "a"})
        return answer.status, answer.body.get("id")

    (first, id), (second, _), (third, _) = begin(), begin(), begin()
    assert (first, second, third) == (200, 200, 429)
    assert server.request("POST", f"/v1/responses/{id}/cancel", headers={"X-Api-Key": "a"}).status == 200
    server.wait(lambda: server.state.used[0].open == 1)
    assert [begin()[0], begin()[0]] == [200, 429]
    server.scheduler.hold = False
    server.wait(lambda: server.state.used[0].open == 0)
