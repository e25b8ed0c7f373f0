"""benchmarks/bench_vllm.py under compare.py, with a stand-in for vLLM that answers at once."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from phalanx.benchmarks import bench_vllm, compare, parts

FAKE = """
import json, os
from types import SimpleNamespace as Of

__version__ = "0.33.0"
SHORT = os.environ.get("SHORT")

class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, **settings):
        config = json.load(open(os.path.join(model, "config.json")))
        print("INFO", json.dumps(settings | {"config": config}), flush=True)
        self.uniform = []

    def generate(self, prompts, sampling, use_tqdm):
        assert len(self.uniform) == (len(prompts[0]["prompt_token_ids"]) != 8) and not use_tqdm
        made = [one.max_tokens - bool(SHORT) for one in sampling]
        return [Of(outputs=[Of(token_ids=[1] * n)]) for n in made]

    def apply_model(self, function):
        assert os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
        self.uniform.append(function.__name__)
"""


def run(tmp_path: Path, *more: str) -> subprocess.CompletedProcess:
    (tmp_path / "vllm.py").write_text(FAKE)
    words = ["--peer", bench_vllm.__file__, "--peer-path", str(tmp_path), "--engines", "peer", "--repeats", "1"]
    words += ["--out", str(tmp_path / "lines.jsonl"), "--config", "tiny", "--reps", "2", *more]
    return subprocess.run([sys.executable, compare.__file__, *words], capture_output=True, text=True, timeout=150)


def test_all_parts_and_what_vllm_is_given(tmp_path):
    done = run(tmp_path, "--tp", "2", "--batches", "1,4", "--peer-args", """--llm '{"max_num_seqs": 8}'""")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    cells = [(line["what"], line.get("batch"), line.get("prompt")) for line in lines]
    assert cells == [
        ("start", None, None), ("decode", 1, 128), ("decode", 4, 128), ("prefill", 1, 8191), ("prefill", 16, 1024),
        ("mixed", None, None), ("mixed", None, None)
    ]  # fmt: skip
    assert {(line["engine"], line["version"], line["config"], line["tp"]) for line in lines} == {
        ("vllm", "0.33.0", "tiny", 2)
    }
    given = json.loads(done.stderr.partition("INFO ")[2].splitlines()[0])
    assert given["tensor_parallel_size"] == 2 and given["max_num_seqs"] == 8 and not given["enable_prefix_caching"]
    assert given["config"]["model_type"] == "llama"


def test_an_answer_that_is_too_short_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SHORT", "1")
    done = run(tmp_path)
    assert done.returncode == 1 and "1 tokens" in done.stderr and not (tmp_path / "lines.jsonl").read_text()


def test_weights_become_those_of_offline():
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(768, 512), "norm": torch.nn.LayerNorm(64)}).bfloat16()
    model.experts = torch.nn.Parameter(torch.zeros(3, 128, 192, dtype=torch.bfloat16))
    model.scale = torch.nn.Parameter(torch.full((4, 4), 7.0))
    model.mixer = torch.nn.ParameterDict({"A": torch.zeros(8)})
    assert bench_vllm.make_uniform(model) == 6
    for weight in (model["up"].weight, *model.experts):
        assert abs(weight.float().std() * weight.shape[-1] ** 0.5 - 1) < 0.02
    assert not torch.equal(model.experts[0], model.experts[1])
    assert (model["norm"].weight == 1).all() and not model["norm"].bias.any() and not model["up"].bias.any()
    assert (model.scale == 7).all() and (model.mixer["A"] == -1).all()


def test_the_parts_of_a_context_that_is_short():
    assert parts.prefills(8192) == [(1, 8191), (16, 1024)] and parts.prefills(1024) == [(1, 1023)]
    lengths, outs = parts.requests(50, 512)
    assert all(p + o <= 512 for p, o in zip(lengths, outs, strict=True)) and min(outs) >= 64
