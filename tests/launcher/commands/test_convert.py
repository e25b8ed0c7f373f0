"""`phalanx convert`: what it writes is served as what it was rounded to, and what it refuses."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from types import SimpleNamespace

import msgspec
import pytest
import torch
from phalanx import child_python
from phalanx.comm import mesh, threads
from phalanx.errors import MODEL, FatalError
from phalanx.launcher import hf_hub
from phalanx.launcher.commands import convert
from phalanx.launcher.job import linux, mpi_env
from phalanx.rank.convert import __main__ as program
from phalanx.rank.convert import calibrate, writer
from phalanx.rank.convert.gptq import Scheme
from phalanx.rank.model.load import load
from phalanx.rank.server.text.load import Text
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers

from ... import retries
from ...checkpoints import CORPUS, make_checkpoint
from ...rank.model.harness import run_steps
from ..test_scripts import until

SIZES = dict(hidden_size=64, head_dim=16, num_attention_heads=8, num_key_value_heads=4, intermediate_size=128,
             num_hidden_layers=2)  # fmt: skip
TEXT = CORPUS * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", **SIZES)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return str(file)


@pytest.fixture
def here(monkeypatch):
    """The work of the command's other process is done in this one, without the seconds that the import of torch
    takes."""

    class Here:
        def __init__(self, command, env, preexec_fn):
            assert command[:-1] == child_python.command(*convert.PROGRAM)
            self._file = command[-1]

        def wait(self):
            return program.main(self._file)

    monkeypatch.setattr(convert, "subprocess", SimpleNamespace(Popen=Here))


@pytest.fixture
def run(here, capfd):
    """The command, its exit code and what it says."""
    return lambda *words: (convert.main([str(word) for word in words]), capfd.readouterr().err)


def rounded_logits(checkpoint, text, scheme, units=(32, 32)):
    """Some tokens, and what the model makes of them that is rounded here."""
    windows, held_out = convert.read_windows(convert.ConvertOptions(calibration=text, samples=6, seqlen=48), checkpoint)
    model = load(checkpoint, threads.run(lambda comm: mesh.build(comm, 1, 1), 1)[0])
    for _ in calibrate.round_model(model, windows, scheme, units):
        pass
    ids = held_out[0][:20]
    with torch.inference_mode():
        return ids, model.logits(model([calibrate.Shared(model).batch([ids])]))[:, : model.vocab_size]


@pytest.mark.parametrize(
    "options, scheme, tp",
    [
        (("--to", "gptq", "--group", "32"), Scheme(4, 32, True), (1, 2)),
        (("--to", "awq", "--group", "32"), Scheme(4, 32, False), (1,)),
        (("--to", "gptq", "--bits", "8", "--group", "32", "--no-sym", "--desc-act"), Scheme(8, 32, False, True), (1,)),
    ],
)
def test_what_is_written_is_what_was_rounded(run, checkpoint, text, tmp_path, options, scheme, tp):
    target = tmp_path / "made"
    code, said = run(checkpoint, target, *options, "--calibration", text, "--samples", "6", "--seqlen", "48")
    assert code == 0, said
    assert "layer 0" in said and "q_proj" in said and "layer 1" in said
    assert "perplexity" in said and f"phalanx serve {target}" in said
    assert sorted(one.name for one in tmp_path.iterdir()) == ["made", "text.txt"]
    assert {one.name for one in target.iterdir()} == {one.name for one in checkpoint.iterdir()}
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["group_size"]) == (options[1], 32)

    ids, expected = rounded_logits(checkpoint, text, scheme)
    for degree in tp:
        (found,) = run_steps(target, [ids], tp=degree)
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("to", ["gptq", "q8_0"])
def test_a_template_that_never_ends_is_no_model_to_convert(checkpoint, text, tmp_path, monkeypatch, to):
    directory = shutil.copytree(checkpoint, tmp_path / "endless")
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
    (directory / "chat_template.jinja").write_text(loops)
    monkeypatch.setattr(convert, "SECONDS", 2.0)
    with pytest.raises(FatalError, match="2 s") as error:
        convert.main(
            [str(directory), str(tmp_path / "made.gguf"), "--to", to, *(["--calibration", text] * (to == "gptq"))]
        )
    assert error.value.code == MODEL and not (tmp_path / "made.gguf").exists()


@pytest.mark.long
def test_a_tokenizer_that_never_ends_while_it_is_used(checkpoint, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(f"{TEXT} ☃", encoding="utf-8")
    directory = shutil.copytree(checkpoint, tmp_path / "slow")
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.normalizer = normalizers.Sequence([normalizers.Replace("☃", "☃☃")] * 40)
    made.save(str(directory / "tokenizer.json"))
    monkeypatch.setattr(convert, "SECONDS", 2.0)
    monkeypatch.setattr(convert, "MEMORY", 1 << 30)
    with pytest.raises(FatalError, match="cannot be used") as error:
        convert.main([str(directory), str(tmp_path / "made"), "--to", "gptq", "--calibration", str(text)])
    assert error.value.code == MODEL and not (tmp_path / "made").exists()


def test_pieces_of_a_text_are_the_text(monkeypatch):
    monkeypatch.setattr(convert, "PIECE", 5)
    for text in ("", "a", "ab\ncd\n", "abcdefghijkl", "abc\n" * 9, "\n" * 7, "abcde\nfghijklm\n"):
        pieces = [*convert._pieces(text)]
        assert "".join(pieces) == text and all(0 < len(piece) <= 5 for piece in pieces)
    assert [*convert._pieces("ab\ncd\nef")] == ["ab\n", "cd\nef"]


MARLIN = dict(hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=4, intermediate_size=192)


def test_marlin(run, tmp_path, text):
    """Linears of multiples of 64 outputs and 128 inputs; what is stored is what GPTQ rounds it to."""
    source = make_checkpoint(tmp_path / "model", **MARLIN, num_hidden_layers=2)
    words = "--group", "64", "--calibration", text, "--samples", "6", "--seqlen", "48"
    code, said = run(source, tmp_path / "made", "--method", "marlin", *words)
    assert code == 0 and "; plain: down_proj" in said
    with safe_open(tmp_path / "made" / "model.safetensors", "pt") as opened:
        names = set(opened.keys())
    assert {"model.layers.1.self_attn.q_proj.B", "model.layers.0.mlp.up_proj.workspace"} <= names
    ids, expected = rounded_logits(source, text, Scheme(4, 64, True), (64, 128))
    (found,) = run_steps(tmp_path / "made", [ids])
    assert (found - expected).abs().max() < 1e-4


def test_fp8(checkpoint, tmp_path):
    words = "convert", str(checkpoint), str(tmp_path / "made"), "--to", "fp8"
    command = [sys.executable, "-m", "phalanx.launcher.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert f"serve {tmp_path}/made" in done.stderr
    settings = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    stored, plain = (load_file(one / "model.safetensors") for one in (tmp_path / "made", checkpoint))
    name = "model.layers.1.mlp.down_proj.weight"  # 64 x 128
    assert stored[name].dtype == torch.float8_e4m3fn and stored[f"{name}_scale_inv"].shape == (1, 1)
    meant = stored[name].float() * stored[f"{name}_scale_inv"]
    assert 0 < (meant - plain[name].float()).abs().max() <= plain[name].float().abs().max() / 16
    assert torch.equal(stored["model.norm.weight"], plain["model.norm.weight"])
    (logits,) = run_steps(tmp_path / "made", [[5, 6, 7]], tp=2)
    assert logits.isfinite().all()


@pytest.mark.long
def test_a_terminal_sees_a_bar(checkpoint, tmp_path):
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))  # of no columns, no bar is drawn
    words = str(checkpoint), str(tmp_path / "made"), "--to", "fp8"
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx.launcher.cli", "convert", *words], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 1 << 16):
            seen += part
    except OSError:  # Linux says so that the other end is closed
        pass
    finally:
        os.close(master)
    assert process.wait(60) == 0, seen
    assert b"encoding:   0%|" in seen and b"encoding: 100%|" in seen and b"tensor/s" in seen


def test_a_gguf_file_has_all_that_is_needed(run, checkpoint, tmp_path):
    file = tmp_path / "made.gguf"
    code, said = run(checkpoint, file, "--to", "Q8_0")
    assert code == 0 and f"phalanx serve {file}" in said and [*tmp_path.iterdir()] == [file]
    one, other = Text(str(checkpoint)), Text(str(file))
    words = "The quick brown fox: 12"
    ids = one.tokenizer.encode(words, True)
    assert other.tokenizer.encode(words, True) == ids and other.template.source == one.template.source
    (got,), (want,) = (run_steps(path, [ids]) for path in (file, checkpoint))
    assert (got - want).abs().max() < 0.4


def test_linears_that_do_not_fit_stay_plain(run, tmp_path, text):
    source = make_checkpoint(tmp_path / "model", **SIZES | dict(intermediate_size=80, dtype="bfloat16"))
    code, said = run(source, tmp_path / "made", "--group", "32", "--calibration", text, "--seqlen", "48")
    assert code == 0 and "plain: gate_proj" in said
    with safe_open(tmp_path / "made" / "model.safetensors", "pt") as opened:
        names = set(opened.keys())
    assert {"model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.qweight"} <= names
    assert len(run_steps(tmp_path / "made", [[1, 2, 3]])) == 1


def test_long_checkpoints_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "LARGEST", 100)
    made = writer.Writer(tmp_path)
    for name in "cab":
        made.add(name, torch.zeros(20))
    made.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00002-of-00003.safetensors",
        "b": "model-00003-of-00003.safetensors",
        "c": "model-00001-of-00003.safetensors",
    }
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "words, code, message",
    [
        ((), 2, "a model and a directory are needed"),
        (("{model}",), 2, "a model and a directory are needed"),
        (("{model}", "{model}"), 2, "is there already"),
        (("{model}", "{to}", "--group", "48"), 2, "--group 48: kernels take groups of a multiple of 32"),
        (("{model}", "{to}", "--bits", "6"), 2, "--bits 6: codes have 4 or 8 bits"),
        (("{model}", "{to}", "--to", "awq", "--bits", "8"), 2, "--bits 8: awq's layout has codes of 4 bits"),
        (("{model}", "{to}", "--calibration", "/no/such/file"), 2, "--calibration /no/such/file: "),
        (("{model}", "{to}", "--calibration", "{short}"), 2, "two pieces of 512 are needed"),
        (("{gguf}", "{to}"), 2, "is a GGUF file"),
        (("{model}", "{to}", "--to", "q4km"), 2, "makes a GGUF file; name one that ends in .gguf"),
        (("{model}", "{to}", "--to", "marlin", "--no-sym"), 2, "--no-sym: Marlin's layout has no zero points"),
        (("{model}", "{to}", "--to", "fp8", "--bits", "4"), 2, "--bits: --to fp8 takes no option but --device; what"),
        (("{model}", "{to}", "--to", "fp8", "--group-size", "32"), 2, "--group-size: --to fp8 takes no option but"),
        (("{model}", "{to}", "--to", "fp8", "--no-sym", "--samples", "9"), 2, "--no-sym, --samples: --to fp8 takes"),
        (("{model}", "{to}.gguf", "--to", "q8_0", "--calibration", "{text}"), 2, "--calibration: --to q8_0 takes no"),
        (("{model}", "{to}.gguf", "--to", "q4km", "--dtype", "f32"), 2, "--to gptq, awq, marlin"),
        (("{model}", "{to}.gguf", "--to", "bf16", "--desc-act", "--seqlen", "64"), 2, "--desc-act, --seqlen: --to bf1"),
        (("{model}", "{to}", "--to", "awq", "--sym"), 2, "--sym: awq's layout always has zero points; use --to gptq"),
        (("{model}", "{to}", "third"), 2, "unexpected argument 'third'"),
        (("{to}/none", "{to}"), 3, "there is no such directory"),
        (("{text}", "{to}"), 2, "is a file: name the directory that has config.json and safetensors"),
        (("{model}", "{to}", "--device", "cuda"), 2, "--device cuda: no GPU was found on "),
        (("{model}", "{to}", "--calibration", "{model}"), 2, ": Is a directory"),
        (("{empty}", "{to}", "--calibration", "{text}"), 3, "config.json: No such file or directory"),
        (("{cut}", "{to}", "--calibration", "{text}"), 3, "config.json is not valid JSON: "),
        (("{cut}", "{to}.gguf", "--to", "q8_0"), 3, "config.json is not valid JSON: "),
        (("{made}", "{to}", "--calibration", "{text}", "--seqlen", "48"), 3, "is quantised already"),
    ],
)
def test_what_is_refused(here, checkpoint, tmp_path, text, words, code, message, capfd, monkeypatch):
    monkeypatch.setattr(mpi_env, "gpus", lambda: 0)
    for name, config in (("empty", None), ("cut", "{")):
        (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(config)
    short = tmp_path / "short.txt"
    short.write_text("too little")
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    made = tmp_path / "made"
    made.mkdir()
    for file in checkpoint.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    places = dict(model=checkpoint, to=tmp_path / "to", short=short, made=made, text=text, gguf=gguf)
    places |= dict(empty=tmp_path / "empty", cut=tmp_path / "cut")
    with pytest.raises(FatalError) as stopped:
        convert.main([word.format(**places) for word in words])
    assert stopped.value.code == code
    assert message in str(stopped.value) + capfd.readouterr().err
    assert not (tmp_path / "to").exists() and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_another_engine_repacks_is_served_as_it_is(here, checkpoint, tmp_path, monkeypatch, capfd, method):
    """candle-vLLM's convert_awq_marlin.py --src DIR --dst DIR --bits 4 --method awq."""
    made = tmp_path / "made"
    shutil.copytree(checkpoint, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    monkeypatch.setattr(convert, "_manual", lambda: CORPUS * 40)
    words = "--src", str(made), "--dst", str(tmp_path / "to"), "--bits", "4", "--method", method
    with pytest.raises(FatalError) as stopped:
        convert.main(words)
    said = capfd.readouterr().err
    assert stopped.value.code == 3 and "quantised" in said and f"({method})" in said
    assert "converted" in said and f"serve {made}" in said
    assert [one.name for one in tmp_path.iterdir()] == ["made"]


def test_the_words_of_another_engines_script(checkpoint, tmp_path, monkeypatch):
    """candle-vLLM's convert_marlin.py --src DIR --dst DIR --samples 512 --seqlen 1024: GPTQ of 4 bits."""
    asked = []
    monkeypatch.setattr(convert, "_run", lambda options, *rest: asked.append(options))
    monkeypatch.setattr(convert, "_manual", lambda: CORPUS * 40)
    words = "--src", str(checkpoint), "--dst", str(tmp_path / "made"), "--samples", "512", "--seqlen", "1024"
    assert convert.main(words) == 0
    (one,) = asked
    assert (one.to, one.bits, one.group, one.sym, one.desc_act) == ("gptq", 4, 128, True, False)
    assert (one.samples, one.seqlen) == (512, 1024)


@pytest.mark.sample(3)
@pytest.mark.parametrize("words", [("--to", "awq", "--no-sym"), ("--method", "marlin", "--bits", "4", "--sym"), ()])
def test_options_of_other_conversions_in_the_environment_are_passed_over(checkpoint, tmp_path, monkeypatch, words):
    asked = []
    monkeypatch.setattr(convert, "_run", lambda options, source, made, *rest: asked.append(options) or made.touch())
    monkeypatch.setattr(convert, "_manual", lambda: CORPUS * 40)
    monkeypatch.setenv("PHALANX_GROUP", "64")
    target = tmp_path / ("made" if words else "made.gguf")
    assert convert.main([str(checkpoint), str(target), *(words or ("--to", "q8_0"))]) == 0
    assert [one.group for one in asked] == [64]


def test_a_model_at_the_hub_is_fetched_with_its_weights(checkpoint, text, tmp_path, monkeypatch):
    fetched, sources = [], []
    monkeypatch.setattr(hf_hub, "model", lambda id: fetched.append(id) or str(checkpoint))
    monkeypatch.setattr(convert, "_run", lambda options, source, *rest: sources.append(source))
    assert convert.main(["some/model", str(tmp_path / "made"), "--calibration", text, "--seqlen", "48"]) == 0
    assert (fetched, sources) == (["some/model"], [checkpoint])


@retries.KILLS
def test_ctrl_c_at_a_terminal_is_one_line(checkpoint, tmp_path):
    """It reaches the whole process group. The process that computes begins with seconds of imports."""
    command = [sys.executable, "-m", "phalanx.launcher.cli", "convert", str(checkpoint), str(tmp_path / "made"), "--to"]
    process = subprocess.Popen([*command, "fp8"], stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: linux.children(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert b"stopped" in said and said.count(b"\n") == 1
    assert process.returncode == 130 and not list(tmp_path.iterdir())


def test_too_little_memory_is_told_in_a_line(tmp_path, monkeypatch, capfd):
    def fail(question):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 TB\nBacktrace")

    question = program.Question("a", "b", "gptq", 4, 128, True, False, "cpu", "auto", [[1, 2]], [[1, 2]])
    (tmp_path / "question").write_bytes(msgspec.json.encode(question))
    monkeypatch.setattr(program, "convert", fail)
    assert program.main(str(tmp_path / "question")) == 4
    said = capfd.readouterr().err
    assert said.startswith("not enough memory (") and "--device cpu" in said and "Backtrace" not in said


def test_what_another_conversion_has_begun_stays(checkpoint, text, tmp_path):
    begun = tmp_path / "made.part" / "weights"
    begun.parent.mkdir()
    begun.touch()
    with pytest.raises(FatalError, match=r"made\.part is there already"):
        convert.main([str(checkpoint), str(tmp_path / "made"), "--calibration", text, "--seqlen", "48"])
    assert begun.exists()
