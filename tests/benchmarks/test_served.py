"""benchmarks/served.py with a small model on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from phalanx.benchmarks import served
from tokenizers import Tokenizer

from ..fields import each

PROGRAM = Path(served.__file__).resolve()
SMALL = "--config tiny --clients 4 --requests 8 --prompts 8-16 --answers 4-8 --reps 1 --n-mixed 1 --args=--device=cpu"


@pytest.mark.parametrize("config", ["tiny", "llama3-8b"])
def test_each_id_has_a_token(tmp_path, config):
    served.write_model(config, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert tokenizer.get_vocab_size() == size
    assert tokenizer.decode(tokenizer.encode("a word, and another").ids) == "a word, and another"
    assert tokenizer.decode([size - 1]).isascii()


def test_a_model_that_sees(tmp_path, monkeypatch):
    """Its special tokens have the ids that its config tells, and its template shows images."""
    monkeypatch.setattr("sys.argv", ["served.py", "--config", "qwen2.5-vl-7b", "--write", str(tmp_path)])
    assert served.main() == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|image_pad|>") == config["image_token_id"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    said = [{"type": "image_url"}, {"type": "text", "text": "a word"}]
    template = jinja2.Template((tmp_path / "chat_template.jinja").read_text())
    ids = tokenizer.encode(template.render(messages=[{"role": "user", "content": said}])).ids
    shown = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    at = ids.index(shown[0])
    assert ids[at : at + 3] == shown and tokenizer.decode(ids[at + 3 : -1]).startswith("a word")


def test_lengths():
    assert sorted(map(int, served.between("3-6").split(","))) == [3, 4, 5, 6]


def test_a_server_that_does_not_start():
    expected = pytest.raises(SystemExit, match="ready.*/nowhere")
    with expected, served.server(["serve", "/nowhere"]):
        raise AssertionError


@pytest.mark.parametrize("least, code", [(0.5, 0), (0.6, 1)])
def test_a_ratio_below_what_is_wanted_is_an_error(monkeypatch, least, code):
    monkeypatch.setattr(served, "served", lambda *_: {"output_tokens_per_s": 10.0})
    monkeypatch.setattr(served, "offline", lambda *_: {"output_tokens_per_s": 20.0})
    monkeypatch.setattr("sys.argv", ["served.py", "--config", "tiny", "--least", str(least)])
    assert served.main() == code


@pytest.mark.long
@pytest.mark.timeout(200)
def test_both_and_their_ratio(tmp_path):
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, str(PROGRAM), *SMALL.split(), "--least", "0.001", "--out", str(out)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert each(lines, "what") == ["served", "mixed", "served / mixed"]
    assert out.read_text() == done.stdout
    assert lines[0]["requests"] == 8
    assert lines[1]["requests"] == 1
    want = lines[0]["output_tokens_per_s"] / lines[1]["output_tokens_per_s"]
    assert lines[2]["ratio"] == pytest.approx(want, abs=1e-3)
