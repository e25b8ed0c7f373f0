"""Thousands of requests that schemathesis makes from the server's own OpenAPI, to a live server of two ranks."""

import importlib.util
import re
import subprocess
import sys

import pytest
from phalanx.rank.server.http.routes import routes

from .processes import wait
from .server import Server

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,  # has to be done within a time
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None,
        reason="schemathesis is not installed (`make install-test` does it)",
    ),
]
CHECKS = "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"
LIMIT = 240  # seconds for all requests; two quiet cores take about one minute
HANG = 60  # seconds for one


def test_no_500_no_hang_and_no_status_that_is_not_documented(tmp_path):
    files = str(tmp_path / "files")
    options = ("--np", "2", "--device", "cpu", "--mem", "64", "--max-tokens", "8", "--file-store", files)
    with Server(*options) as server:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--phases", "coverage,fuzzing", "--max-examples", "3", "--generation-deterministic", "--no-shrink"),
            *("--checks", ",".join(CHECKS), "--continue-on-failure", "--no-color", "--workers", "2"),
            *("--request-timeout", str(HANG)),
            *(word for route in routes() for path in route.also for word in ("--exclude-path", path)),  # the same again
        ]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
        assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
        cases = re.search(r"(\d+) generated", found.stdout)
        assert cases and int(cases[1]) >= 2000, found.stdout[-2000:]
        print(cases[0])
        assert not wait(lambda: server.metric("phalanx_sequences_open"), 30)
        asked = {"messages": [{"role": "user", "content": "hi"}]}
        assert server.request("/v1/chat/completions", asked)[0] == 200 and len(server.ranks) == 2
