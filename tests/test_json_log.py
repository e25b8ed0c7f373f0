"""`phalanx serve --log-format json`: every line of the job's output is an object, whichever process wrote it."""

import json

import pytest

from .fields import each
from .processes import kill, wait
from .server import Server

pytestmark = pytest.mark.timeout(120)


def objects(server):
    return [json.loads(line) for line in list(server.lines)]


@pytest.mark.long
def test_the_whole_jobs_output_is_json_and_the_access_log_has_fields():
    with Server("--np", "2", "--device", "cpu", "--mem", "64", "--log-format", "json", "--access-log") as server:
        for id in ("first", "second"):
            body = {"prompt": "x", "max_tokens": 2}
            status, _, _ = server.request("/v1/completions?a=%1b", body, **{"X-Request-Id": id})
            assert status == 200
        assert server.request("/v1/nothing", **{"X-Request-Id": "third"})[0] == 404
        assert not wait(lambda: "third" not in server.output, 10)
        access = [one for one in objects(server) if "status" in one]
        assert [(one["request_id"], one["method"], one["path"], one["status"]) for one in access] == [
            ("first", "POST", "/v1/completions?a=%1b", 200),
            ("second", "POST", "/v1/completions?a=%1b", 200),
            ("third", "GET", "/v1/nothing", 404),
        ]
        assert all(one["duration_ms"] >= 0 and one["process"] == "server" for one in access)
        kill([server.ranks[1]])
        assert server.exit_code() == 137
    found = objects(server)
    assert set(each(found, "process")) >= {"launcher", "server", "rank 0"}
    assert any(one["level"] == "error" and "has died" in one["message"] for one in found)
    assert any(one["level"] == "error" and one["process"] == "launcher" for one in found)
    assert all("request_id" not in one for one in found if one["process"] != "server")
