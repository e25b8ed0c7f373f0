"""A model whose chat template never ends or fills the memory, served beside a stream, at the usual limits."""

import shutil
import time
from pathlib import Path

import pytest
from phalanx.launcher import builtin_model

from .. import retries
from ..server import Server, Stream

pytestmark = [pytest.mark.long, pytest.mark.timeout(150), retries.CLOCKS]
TEMPLATE = (
    "{% if attack == 'time' %}{% set t = 'x' * m %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}"
    "{% endfor %}{% endfor %}{% elif attack == 'memory' %}{% set s = namespace(t='x') %}{% for i in range(40) %}"
    "{% set s.t = s.t + s.t %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    shutil.copytree(builtin_model.DIRECTORY, model := folder / "model")
    (folder / "template").write_text(TEMPLATE)
    with Server(str(model), "--np", "1", "--device", "cpu", "--chat-template", str(folder / "template")) as one:
        yield one


def chat(server, attack):
    body = {"messages": "hi", "max_tokens": 1, "chat_template_kwargs": {"attack": attack, "m": 100_000}}
    status, answer, _ = server.request("/v1/chat/completions", body)
    return status, answer


@pytest.mark.parametrize("attack", ["memory", "time"])
def test_a_request_ends_alone(server, attack):
    assert chat(server, "")[0] == 200
    resident = Path(f"/proc/{server.server_pid}/statm")
    before = int(resident.read_text().split()[1])
    stream = Stream(server, 200)
    began = time.monotonic()
    status, answer = chat(server, attack)
    assert status == 400 and answer["error"]["code"] in ("text_limits", None), answer
    assert time.monotonic() - began < 55  # ten seconds of a processor, of a machine that may be busy
    assert "data: [DONE]" in stream.rest()
    assert (int(resident.read_text().split()[1]) - before) * 4096 < 64 << 20
    assert chat(server, "")[0] == 200
