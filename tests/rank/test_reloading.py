"""One job serves a model, unloads it and serves another; ranks, mesh and watchdog stay."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job

from ..checkpoints import make_checkpoint
from ..engine import device
from ..ranks import environment, under_mpirun
from .reference import Reference
from .reloading import PROMPT

SIZES = dict(hidden_size=384, intermediate_size=1600, vocab_size=4096, num_attention_heads=12, num_key_value_heads=6)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, isq",
    [(1, "none"), (2, "none"), (2, "q8_0")],
)
def test_one_model_after_the_other(tmp_path, ranks, isq):
    models = [
        make_checkpoint(tmp_path / kind, kind, seed=2, tokenizer=False, head_dim=32, **SIZES)
        for kind in ("llama", "qwen3")
    ]
    options = Options(ranks=ranks, device=device(ranks), dtype="f32", isq=isq, mem=64, max_num_seqs=4, timeout=60)
    environ = {
        "MODELS": ":".join(map(str, [*models, models[0]])),
        JOB_ENV: encode_job(Job(options=options, announced_size=ranks)),
    }
    command = [sys.executable, str(Path(__file__).with_name("reloading.py"))]
    if ranks > 1:
        command = [*under_mpirun(ranks), *command]
    done = subprocess.run(command, env=environment(**environ), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    told = [line["tokens"] for line in lines if "tokens" in line]
    want = [Reference(model, isq).greedy(PROMPT, 20)[0] for model in models]
    assert told == [*want, want[0]] and want[0] != want[1]
    for rank in range(ranks):
        memory = [line for line in lines if line.get("rank") == rank]
        assert len(memory) == 3
        assert all(line["frozen"][0] > 10 * line["looked_at"] for line in memory)
        assert all(line["frozen"][1] < line["frozen"][0] for line in memory)  # what the model left is not kept
        if options.device == "cpu" and not hasattr(ctypes.CDLL(None), "malloc_trim"):
            continue  # the C library keeps what is freed
        held = [line["held"] for line in memory]
        assert held[2] <= 1.01 * held[1]  # the first two have imported and compiled all there is
        half = (20 if isq == "none" else 4) << 20  # of a rank's weights and more
        assert all(line["loaded"] - line["held"] > half for line in memory)
