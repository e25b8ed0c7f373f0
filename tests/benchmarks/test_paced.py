"""The server at a set pace: it answers over HTTP, and says at the end what that took."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from phalanx.benchmarks.serving import paced

from .. import retries
from ..processes import Started

pytestmark = retries.CLOCKS


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_paced_server_answers_and_reports():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(paced.__file__)), "--p", str(port), "--step-ms", "20"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    started = Started(process.pid)
    try:
        assert any("is ready" in line for line in process.stderr)
        body = {"model": "x", "max_tokens": 7, "ignore_eos": True, "messages": [{"role": "user", "content": "Hello"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 7
        started.look()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
        parts = r"server \d+\.\d, scheduler \d+\.\d, step \d+\.\d"
        assert re.search(rf"7 tokens.*{parts}", said), said
        assert not started.left()
    finally:
        started.kill()
        process.wait(10)
