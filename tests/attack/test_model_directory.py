"""A hostile model directory: links out of it, FIFOs and devices, against a live server."""

import os
import shutil
from pathlib import Path

import pytest
from phalanx import errors

from ..checkpoints import make_checkpoint
from ..server import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(100)]
OPTIONS = ("--device", "cpu", "--mem", "64", "--np", "1")
KEYS = {"PHALANX_API_KEY": "hush-key", "HF_TOKEN": "hush-token"}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hostile") / "tiny")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("chat_template.jinja", "/proc/self/environ"),
        ("tokenizer_config.json", "secret"),
        ("generation_config.json", "secret"),
        (WEIGHTS, "/proc/self/environ"),
        (WEIGHTS, "/dev/zero"),
        (WEIGHTS, "fifo"),
        ("config.json", "fifo"),
    ],
)
def test_it_is_refused(whole, tmp_path, name, target):
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    (tmp_path / "secret").write_text('{"hush": "hush"}')
    (model / name).unlink()
    if target == "fifo":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to(target if target.startswith("/") else tmp_path / target)
    with Server(str(model), *OPTIONS, wait=False, **KEYS) as server:
        assert server.exit_code(60) == errors.MODEL, server.output
        assert name in server.output and "hush" not in server.output.replace(str(tmp_path), "")
        assert not server.left()


def test_a_template_that_shows_the_environment_shows_no_key(whole):
    """Even where the operator names such a template: no process of the job has a key in its environment."""
    with Server(str(whole), *OPTIONS, "--chat-template", "/proc/self/environ", **KEYS) as server:
        key = {"Authorization": "Bearer hush-key"}
        assert server.request("/apply-template", {"messages": []})[0] == 401
        body = {"messages": [{"role": "user", "content": "a"}]}
        status, answer, _ = server.request("/apply-template", body, **key)
        assert status == 200 and "PATH=" in str(answer) and "hush" not in str(answer)
        for pid in server.started.look():
            assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()
