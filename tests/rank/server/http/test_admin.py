"""Endpoints that --admin opens to key holders, and nobody without it. tests/test_sleep.py has a live job."""

import logging

import pytest

CALLS = [
    ("POST", "/sleep", None),
    ("POST", "/wake_up", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/admin/log-level", {"level": "debug"}),
]


def test_without_the_option_nobody_may(make_server):
    server = make_server()
    for method, path, body in CALLS:
        answer = server.request(method, path, body)
        assert (answer.status, answer.body["error"]["code"]) == (403, "admin_off")


def test_a_key_is_needed(make_server):
    server = make_server(api_keys=["k"], admin=True)
    for method, path, body in CALLS:
        assert server.request(method, path, body).status == 401


@pytest.fixture
def level():
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_the_log_s_level(make_server, level):
    server = make_server(admin=True)
    answer = server.request("POST", "/admin/log-level", {"level": "debug"})
    assert (answer.status, answer.body) == (200, {"level": "debug"})
    assert logging.getLogger().level == logging.DEBUG
    for wrong in ({"level": "loud"}, {}, {"level": 10}):
        assert server.request("POST", "/admin/log-level", wrong).status == 400
    assert logging.getLogger().level == logging.DEBUG


def test_what_sleeps_not(make_server):
    server = make_server(admin=True)  # no options to load it again: as where several models take turns
    assert server.request("GET", "/is_sleeping").body == {"is_sleeping": False}
    answer = server.request("POST", "/sleep?level=1")
    assert answer.status == 400 and "idle_unload" in answer.body["error"]["message"]
    answer = server.request("POST", "/sleep?level=3")
    assert (answer.status, answer.body["error"]["param"]) == (400, "level")
    assert server.request("POST", "/wake_up").status == 200  # it is awake
