"""Memory that one client makes the server keep: large responses in the background."""

import time

import pytest

from .. import retries
from ..checkpoints import make_checkpoint
from ..server import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(120), retries.CLOCKS]
SIZE = 20 << 20
MANY = 7  # more than a half of what there is room for; a large body takes seconds, as it is read slowly


def resident(pid):
    """Bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


def test_large_responses_in_the_background_are_bounded(tmp_path):
    checkpoint = str(make_checkpoint(tmp_path / "tiny", max_position_embeddings=1 << 20))
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    with Server(checkpoint, "--device", "cpu", "--mem", "64", "--api-key-file", str(keys)) as server:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        before = resident(server.server_pid)
        body = {"input": "hi", "background": True, "ignore_eos": True, "user": "x" * SIZE}
        answers = [server.request("/v1/responses", body, **one) for _ in range(MANY)]
        kept = [answer["id"] for status, answer, _ in answers if status == 200]
        refused = [answer["error"]["code"] for status, answer, _ in answers if status == 429]
        assert len(kept) + len(refused) == MANY and 1 <= len(kept) < MANY and set(refused) == {"busy"}
        deadline = time.monotonic() + 20  # what was read and decoded goes back soon
        while (grown := resident(server.server_pid) - before) > 2.2 * SIZE * len(kept):
            assert time.monotonic() < deadline, f"{grown >> 20} MiB"
            time.sleep(0.2)
        assert server.request("/v1/responses", body, **two)[0] == 200  # another key has its own share
        for id in kept:
            assert server.request(f"/v1/responses/{id}/cancel", {}, **one)[0] == 200
