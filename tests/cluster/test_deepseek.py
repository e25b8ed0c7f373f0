"""DeepSeek-V3 in AWQ on two hosts with experts in host memory, as candle-vLLM's pages have it, answers a chat."""

import json
import signal
import subprocess
import sys

import pytest

from ..checkpoints import CORPUS, write_tokenizer
from ..rank.model.shapes import DEEPSEEK, DEEPSEEK_YARN
from ..rank.model.test_architectures import write
from ..server import Server
from .hosts import HostsServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

GROUP = 32  # inputs: each of four ranks has whole ones
SIZES = DEEPSEEK | dict(
    model_type="deepseek_v3", hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=24, v_head_dim=32,
    first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=DEEPSEEK_YARN,
)  # fmt: skip
CHAT = {
    "messages": [{"role": "user", "content": "Which fox is quick?"}],
    "max_tokens": 40, "temperature": 0, "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    place = tmp_path_factory.mktemp("deepseek")
    write(place / "plain", **SIZES)
    write_tokenizer(place / "plain")
    text = place / "text.txt"
    text.write_text(CORPUS * 4, encoding="utf-8")
    words = [place / "plain", place / "awq", "--to", "awq", "--group", GROUP, "--calibration", text]
    words += ["--samples", 8, "--seqlen", 48, "--device", "cpu"]
    subprocess.run([sys.executable, "-m", "phalanx.launcher.cli", "convert", *map(str, words)], check=True, timeout=100)
    settings = json.loads((place / "awq" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["group_size"]) == ("awq", GROUP)
    return place / "awq"


def answer(server: Server) -> str:
    status, found, _ = server.request("/v1/chat/completions", CHAT)
    assert status == 200, found
    return found["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def want(checkpoint):
    """The answer of one rank that has all."""
    with Server(str(checkpoint), "--device", "cpu", "--mem", "16") as server:
        return answer(server)


@pytest.mark.parametrize("ep, held, out", [(1, 16, 12), (4, 4, 3)])
def test_the_recipe(hosts, checkpoint, want, ep, held, out):
    """A quarter of a rank's experts of a layer, or of its parts of them, stay on its device. By --ep 4 each host's
    memory has the experts of its own ranks alone."""
    options = f"--device cpu --mem 16 --tp 4 --ep {ep} --num-experts-offload-per-rank {out}".split()
    with HostsServer(hosts, str(checkpoint), *options) as server:
        assert [len(host.processes(r"-m phalanx\.rank$")) for host in hosts.all] == [2, 2]
        assert answer(server) == want
        assert f"experts: {held}" in server.output
        assert f"{held - out} of them resident" in server.output
        ways = [server.metric(f"phalanx_experts_{way}_total") for way in ("resident", "cpu", "streamed")]
        assert ways[0] > 0 and ways[1] + ways[2] > 0
        server.process.send_signal(signal.SIGUSR1)
        assert server.exit_code(30) == 0, server.output
        assert not hosts.left()
