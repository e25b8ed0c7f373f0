"""The usage of each key."""

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
    assert used(server, "b")[1] > 0
    assert server.request("GET", "/v1/usage").status == 401


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
    assert "2 (--requests-per-key): wait" in json.loads(answer.read())["error"]["message"]
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


def test_priorities_are_refused_unless_clients_may_have_them(fresh_server):
    for path, fields in (("completions", {"prompt": "x"}), ("embeddings", {"input": "x"})):
        answer = fresh_server.post(path, **fields, priority=-1)
        assert answer.status == 400 and answer.body["error"]["param"] == "priority"
        assert "--client-priorities" in answer.body["error"]["message"]
        assert fresh_server.post(path, **fields, priority=0).status == 200


def test_a_key_goes_before_others_within_its_share(start_server):
    """One row of four is a key's share with two keys: together they never have all."""
    server = start_server(api_keys=["a", "b"], client_priorities=True, scheduler={"pause": 0.2})
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200, "priority": -9})

    def ask(key, body=body):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/v1/completions", body, {"X-Api-Key": key, "Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        return answer, connection

    running = [ask("a"), ask("a"), ask("b"), ask("b", body.replace("-9", "7"))]
    assert [request.priority for request in server.scheduler.requests] == [-9, 0, -9, 7]
    for answer, connection in running:
        answer.close()
        connection.close()
    server.wait(lambda: [(used.open, used.ahead) for used in server.state.used] == [(0, 0)] * 2)
    answer, connection = ask("a")
    assert server.scheduler.requests[-1].priority == -9
    answer.close()
    connection.close()


def test_grammars_carry_the_owner_of_their_key(start_server):
    server = start_server(api_keys=["a", "b"])
    for key in "aba":
        server.request("POST", "/v1/completions", {"prompt": "x", "guided_regex": "[a-z]+"}, {"X-Api-Key": key})
    first, second, third = (request.owner for request in server.scheduler.requests)
    assert first == third != second and second
