"""Two hosts with two ranks each say what one rank says, whichever way the model is cut."""

import functools
import random
import signal

import pytest

from ..checkpoints import make_checkpoint
from ..rank.reference import Reference
from ..server import Server
from .hosts import HostsServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

SEED = 7  # a checkpoint whose greedy text is varied and never close to a tie
PROMPTS = [random.Random(i).choices(range(3, 500), k=20 + 15 * i) for i in range(4)]
COUNT = 100
SHAPES = ["--tp 2 --pp 2", "--tp 4", "--dp 2 --tp 2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of 8 heads and 4 key heads: it cuts into 4."""
    place = tmp_path_factory.mktemp("tokens") / "tiny"
    return make_checkpoint(place, seed=SEED, num_attention_heads=8, num_key_value_heads=4)


def ask(server: Server) -> list[list[int]]:
    """All prompts at once; the tokens that each was continued with."""
    body = {"prompt": PROMPTS, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer, _ = server.request("/v1/completions", body)
    assert status == 200, answer
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


@pytest.fixture(scope="module")
def want(checkpoint):
    """One rank's tokens, which are transformers' too."""

    @functools.cache
    def one_rank() -> list[list[int]]:
        with Server(str(checkpoint), "--device", "cpu", "--mem", "64") as server:
            tokens = ask(server)
        reference = Reference(checkpoint)
        assert tokens == [reference.yardstick(prompt, COUNT) for prompt in PROMPTS]
        return tokens

    return one_rank


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_greedy_tokens_as_one_rank(hosts, checkpoint, want, shape):
    with HostsServer(hosts, str(checkpoint), "--device", "cpu", "--mem", "64", *shape.split()) as server:
        near, far = (host.processes(r"-m phalanx\.rank$") for host in hosts.all)
        assert len(near) == len(far) == 2
        assert ask(server) == want()
        server.process.send_signal(signal.SIGUSR1)
        assert server.exit_code(30) == 0, server.output
        assert not hosts.left()
