"""`phalanx fit` as it is typed: the table, the JSON and every complaint."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import phalanx
import pytest
from phalanx.errors import USAGE
from phalanx.launcher import cli, hf_hub
from phalanx.launcher.commands.fit import devices, measured
from phalanx.launcher.options import option_sources
from phalanx.rank.options import Options

from .... import gguf_files
from ....checkpoints import make_checkpoint
from ....fields import each
from .. import fake_hub
from .configs import CONFIGS, ask, write

ROOT = Path(phalanx.__file__).resolve().parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured, "ask", ask)

    def run(name, *words):
        path = write(tmp_path / name, CONFIGS[name]) if name else None
        code = cli.main(["fit", *([str(path)] if path else []), *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek of 4 layers"])
def test_a_cache_in_fp8_holds_twice_the_tokens(fit, name):
    words = ("--gpus", "8", "--gpu-mem", "141", "--tp", "8", "--json")
    plain, narrow = (json.loads(fit(name, *words, *more)[1]) for more in ((), ("--fp8-kvcache",)))
    before, after = (
        next(one for one in found["layouts"] if (one["tp"], one["pp"]) == (8, 1)) for found in (plain, narrow)
    )
    assert 1.98 < before["kv_bytes_per_token"] / after["kv_bytes_per_token"] <= 2
    assert 1.98 < after["kv_tokens"] / before["kv_tokens"] < 2.01
    assert any("--kv-cache-dtype fp8" in line for line in narrow["command"])


def test_the_table(fit, tmp_path):
    code, out, err = fit(
        "Llama-3.1-70B", "--nodes", "2", "--gpus", "8", "--gpu-mem", "141", "--context", "32768", "--concurrency", "256"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "Llama-3.1-70B: llama, 70.55 billion" in lines[0]
    assert "rank (speeds: measured); computing" in lines[1]
    assert "32768 tokens, 16384" in lines[2]
    assert lines[4].split()[:4] == ["tp", "pp", "dp", "ep"]
    (chosen,) = [line for line in lines if line.startswith(">")]
    tp, pp = chosen.split()[1:3]
    assert int(tp) * int(pp) <= 16
    assert any("sequence" in line and "32768 tokens" in line for line in lines)  # 141 GB on one GPU
    assert any("256 sequences" in line and "once" in line for line in lines)
    assert any(re.search(r"fewest.*2 ranks.*pp 2\b", line) for line in lines)
    (parts,) = [line for line in lines if line.startswith("GB on a rank: ")]
    assert "attention" in parts and "rope tables" in parts and "bytes a token" in parts
    run = lines[lines.index("Run:") + 1 :]
    assert run[0].split()[1:4] == ["hostfile", "--slots", "8"]
    assert "hosts --bind-to none --map-by" in run[1]
    assert "--mpi=pmix --nodes=2 --ntasks-per-node=8 phalanx" in run[2]


def test_the_command_is_one_that_serve_takes(fit, tmp_path):
    _, out, _ = fit(
        "Llama-3.1-8B", "--gpus", "4", "--gpu-mem", "80", "--dtype", "f16", "--kv-fraction", "0.8", "--tp", "4"
    )
    line = out.splitlines()[-1].strip()
    chosen = option_sources.read(Options, shlex.split(line.partition("phalanx serve ")[2]), {}).options
    assert (chosen.tp, chosen.pp, chosen.devices, chosen.dtype) == (4, 1, (0, 1, 2, 3), "f16")
    assert (chosen.max_model_len, chosen.max_num_seqs, chosen.kv_fraction) == (8192, 64, 0.8)
    assert chosen.model == str(tmp_path / "Llama-3.1-8B")


def test_json(fit):
    code, out, _ = fit("Qwen3-30B-A3B", "--gpus", "4", "--device", "h100", "--json", "--length", "272")
    found = json.loads(out)
    assert code == 0
    assert found["model"]["parameters"] == 30_532_122_624
    asked = {"context": 8192, "concurrency": 64, "length": 272, "dtype": "bf16", "images": 0, "zipf": 0.8}
    assert found["asked"] == asked | {"speculate": "auto", "drafts": 0}
    assert found["cluster"]["device"] == "H100"
    best = found["layouts"][found["best"]]
    assert best["verdict"] == "everything asked for fits"
    assert best["fits"] and best["weight_bytes"] == sum(best["weights"].values())
    assert best["decode_ms"] > 0 and best["prefill_tokens_per_s"] > 0
    assert not any(one["offload"] for one in found["layouts"])
    assert any(one["ep"] == 4 for one in found["layouts"])
    assert found["command"]


def test_a_head_that_drafts(fit):
    """It takes memory of the last stage, and the command asks for it."""
    words = "--gpus", "8", "--gpu-mem", "141", "--pp", "2", "--tp", "4", "--json"
    plain, more = (
        json.loads(fit("DeepSeek of 4 layers", *words, *of)[1]) for of in ((), ("--speculate", "mtp"))
    )  # fmt: skip
    before, after = (one["layouts"][one["best"]] for one in (plain, more))
    # A layer of experts in e4m3, 4 ranks sharing it, a projection of twice the width, and the embedding.
    assert 256 * 3 * 7168 * 2048 / 4 < after["draft_bytes"] - 2 * 129280 * 7168 / 4 < 1.1 * 256 * 3 * 7168 * 2048 / 4
    assert before["draft_bytes"] == 0 and after["draft_kv_bytes_per_token"] == 2 * 576
    stages = [[one["kv_bytes_per_token"] // (2 * 576) for one in found["stages"]] for found in (before, after)]
    assert stages == [[2, 2], [2, 3]] and more["asked"]["drafts"] == 3
    assert more["model"]["checkpoint"] == plain["model"]["checkpoint"]
    (line,) = more["command"]
    chosen = option_sources.read(Options, shlex.split(line.partition("phalanx serve ")[2]), {}).options
    assert (chosen.speculate, chosen.draft_model) == ("mtp", "")
    _, out, _ = fit("DeepSeek of 4 layers", "--gpus", "8", "--gpu-mem", "141", "--speculate", "mtp")
    assert "(1152 bytes a token)" in out and " 3 drafts" in out


def test_a_smaller_model_that_drafts(fit, tmp_path):
    draft = str(write(tmp_path / "small", CONFIGS["Llama-3.1-8B"] | {"num_hidden_layers": 2}))
    _, out, _ = fit("Llama-3.1-70B", "--gpus", "4", "--gpu-mem", "141", "--draft-model", draft, "--json")
    found = json.loads(out)
    best = found["layouts"][found["best"]]
    assert best["draft_bytes"] == best["weights"]["drafts"] > 0
    assert any(f"--draft-model {draft}" in line for line in found["command"])
    code, _, err = fit("Llama-3.1-70B", "--gpus", "4", "--gpu-mem", "141", "--speculate", "mtp")
    assert code == USAGE and "--speculate mtp" in err


def test_experts(fit):
    """Not all of them work for a token, and where the GPU is too small they may lie in the host's memory."""
    code, out, _ = fit("Qwen3-30B-A3B", "--gpu-mem", "24", "--host-mem", "256")
    assert code == 0
    assert re.search("30.53 billion.*3.04 billion", out.splitlines()[0])
    (chosen,) = [line for line in out.splitlines() if line.startswith(">")]
    count = re.search(r"  (\d+) experts a layer in host memory alone  ", chosen)[1]
    assert 0 < int(count) < 128 and f" --num-experts-offload-per-rank {count} --max-model-len " in out
    (experts,) = [line for line in out.splitlines() if line.startswith("Experts on a rank: ")]
    assert f": {count} of" in experts and f"--num-experts-offload-per-rank {count})" in experts
    assert f" {128 - int(count)} resident" in experts
    assert " 58.0 GB on " in experts
    assert re.search(r" \d+ tokens/s for \d", experts)
    assert ("0.8 (--zipf), 54 GB/s") in out
    _, out, _ = fit("Qwen3-30B-A3B", "--gpu-mem", "24", "--host-mem", "256", "--zipf", "0")
    assert "even routing, 54 GB/s" in out
    speeds = re.search(r"(\d+) tokens/s for \d+ sequences, (\d+) if all are chosen evenly\n", out)
    assert speeds[1] == speeds[2]


def test_experts_that_host_and_gpu_hold_together_alone(fit):
    """Only as many as the host needs are fixed on the GPU. As these do not follow
    the routing, steps take longer unless it is even; with too little of both nothing fits."""
    words = ("Qwen3-30B-A3B", "--gpu-mem", "24", "--concurrency", "1", "--host-mem")
    found = {gib: json.loads(fit(*words, gib, "--json")[1]) for gib in ("256", "53", "40", "20")}
    layouts = {gib: one["layouts"][-1] for gib, one in found.items()}
    assert (layouts["256"]["fixed"], layouts["256"]["host_bytes"]) == (0, 48 * 603_979_776 * 2)
    each, largest = 48 * 603_979_776 * 2 / 128, 603_979_776 * 2 * 2 / 3
    for gib in ("53", "40"):
        one = layouts[gib]
        assert one["fixed"] > 0
        assert one["host_bytes"] == round((128 - one["fixed"]) * each)
        assert one["host_bytes"] + largest <= int(gib) * devices.GIB * 0.95 < one["host_bytes"] + largest + each
        assert one["fits"] and one["decode_ms"] > 1.01 * layouts["256"]["decode_ms"]
        assert one["even_tokens_per_s"] == pytest.approx(layouts["256"]["even_tokens_per_s"])
        assert one["even_tokens_per_s"] < one["decode_tokens_per_s"]
    assert found["20"]["best"] is None and "host" in layouts["20"]["verdict"]
    code, out, _ = fit(*words, "40")
    fixed, resident = layouts["40"]["fixed"], 128 - layouts["40"]["offload"] - layouts["40"]["fixed"]
    assert code == 0 and f"host memory alone, {fixed}" in out
    assert f"alone, {resident} resident;" in out
    assert re.search(rf"host,.* {128 - fixed}\b", out)


def test_a_given_number_of_experts_in_host_memory(fit):
    """It fits without; --offload says how many all the same."""
    words = ("--gpus", "4", "--gpu-mem", "80", "--concurrency", "16", "--json")
    found = json.loads(fit("Qwen3-30B-A3B", *words, "--offload", "40")[1])
    assert {(one["ep"], one["offload"]) for one in found["layouts"]} == {(1, 40), (2, 40), (4, 32)}
    whole = next(one for one in found["layouts"] if (one["tp"], one["pp"], one["dp"], one["ep"]) == (4, 1, 1, 4))
    assert (whole["resident_bytes"], whole["host_bytes"]) == (0, 2 * 48 * 603_979_776 // 4)
    assert " --num-experts-offload-per-rank 40 " in found["command"][0]
    plain = json.loads(fit("Qwen3-30B-A3B", *words)[1])
    assert max(each(found["layouts"], "decode_tokens_per_s")) < plain["layouts"][0]["decode_tokens_per_s"]
    for name, more, message in (
        ("Llama-3.1-8B", ("--gpu-mem", "80"), "--offload 3: Llama-3.1-8B has no experts"),
        ("Qwen3-30B-A3B", ("--device", "cpu"), "--offload 3: CPUs have all experts in host memory"),
        (
            "Qwen3-30B-A3B",
            ("--gpus", "8", "--gpu-mem", "80", "--tp", "1", "--dp", "8", "--ep", "8"),
            "--offload 3: experts that span replicas cannot be in host memory",
        ),
    ):
        assert fit(name, *more, "--offload", "3") == (2, "", f"phalanx: {message}\n")


def test_experts_on_a_host_that_doctor_has_measured(fit):
    words = ("Qwen3-30B-A3B", "--gpus", "2", "--gpu-mem", "24", "--host-mem", "256", "--offload", "128")
    before = json.loads(fit(*words, "--json")[1])
    devices.save_speed(devices.CpuSpeed("node7", 8, 896.0, 40.0, 12.0, "2026-11-21"), os.environ)
    code, out, _ = fit(*words)
    assert code == 0
    # half of its 40 GB/s, and of 0.61 of its 896 GFLOP/s
    assert ("computes 0.28 TFLOP/s (8") in out
    after = json.loads(fit(*words, "--json")[1])
    assert before["cluster"]["host"]["bandwidth"] == 98e9
    assert after["cluster"]["host"]["bandwidth"] == 20e9
    slower, faster = (next(one for one in found["layouts"] if one["offload"]) for found in (after, before))
    assert slower["decode_ms"] > 2 * faster["decode_ms"]


def test_experts_shared_out(fit):
    code, out, _ = fit("Qwen3-30B-A3B", "--gpus", "4", "--gpu-mem", "80", "--tp", "4", "--ep", "2")
    assert code == 0
    assert re.findall(r"--(?:tp|pp|ep) \d+", out) == ["--tp 4", "--pp 1", "--ep 2"]
    for model, ep, message in (
        ("Llama-3.1-8B", "2", "--ep 2: Llama-3.1-8B has no experts"),
        ("Qwen3-30B-A3B", "256", "--ep 256 is more than the 128 experts of Qwen3-30B-A3B"),
        (
            "Qwen3-30B-A3B",
            "3",
            "with --ep 3: tensor degrees that its heads allow are 1, 2, 4, 8, 16, 32, pipeline stages at most",
        ),
    ):
        code, _, err = fit(model, "--gpus", "4", "--gpu-mem", "80", "--ep", ep)
        assert code == 2 and message in err


@pytest.mark.long
def test_quantised_experts_in_host_memory(fit):
    """The model fits, but only with its experts in the host's memory."""
    code, out, _ = fit("DeepSeek-V3", "--gpus", "8", "--gpu-mem", "80", "--host-mem", "1024")
    assert code == 0
    (count,) = re.findall(r"\n  phalanx serve .* --num-experts-offload-per-rank (\d+) ", out)
    assert int(count) < 256


@pytest.mark.long
def test_what_the_documents_show(fit, tmp_path, monkeypatch):
    """Lines of docs/cluster.md below `$ phalanx fit` are what it prints; … stands for what is left out."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    write(tmp_path / "DeepSeek-R1-AWQ", CONFIGS["DeepSeek-V3"] | {"quantization_config": awq})
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/cluster.md").read_text()
    blocks = re.findall(r"```\n\$ phalanx fit (.*?)\n(.*?)\n```", text, re.DOTALL)
    assert len(blocks) == 2
    for words, lines in blocks:
        code, out, _ = fit("", *shlex.split(words))
        assert code == 0
        pattern = ".*?".join(map(re.escape, re.split("\n?…\n?", lines)))
        assert re.search(pattern, re.sub("\n+", "\n", out), re.DOTALL)  # run it again, and paste


def test_nothing_fits(fit):
    code, out, _ = fit("Llama-3.1-70B", "--gpus", "4", "--gpu-mem", "24")
    assert code == 4
    assert out.endswith("Nothing fits.\n")
    assert "these devices" in out
    assert "weights do not fit:" in out and "GB too little" in out


def test_what_would_be_faster(fit):
    _, out, _ = fit("Llama-3.1-8B", "--gpus", "8", "--gpu-mem", "141", "--context", "2048", "--concurrency", "2048")
    if "--dp" not in out:
        assert "served yet" in out


def test_the_built_in_model_on_cpus(fit):
    code, out, err = fit("", "--device", "cpu", "--gpus", "2")
    assert (code, err) == (0, "")
    assert "2 ranks" in out and "computing in f32" in out
    assert "cores; `phalanx doctor` measures" in out
    assert "--max-model-len 2048 --max-num-seqs 32" in out
    code, out, err = fit("", "--device", "cpu", "--gpus", "2", "--dp", "1")
    assert "--max-model-len 2048 --max-num-seqs 64" in out
    assert re.search("1 node.*1 rank.*CPUs", fit("", "--device", "cpu")[1])


def test_what_doctor_measured_is_used(fit, monkeypatch):
    devices.save_speed(devices.CpuSpeed("here", 2, 100.0, 10.0, 15.0, "2026-11-21"), os.environ)
    _, out, _ = fit("", "--device", "cpu")
    assert "phalanx doctor, 2026-11-21)" in out


def test_a_device_of_another_size(fit):
    _, out, _ = fit("Llama-3.1-8B", "--device", "H100", "--gpu-mem", "94", "--json")
    assert json.loads(out)["cluster"]["memory"] == round((94 - devices.HIDDEN) * 2**30)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--gpus", "8"],
            "which GPU?: give --gpu-mem as one of 24 (RTX4090), 32 (RTX5090), 40 (A100-40GB)",
        ),
        (["--gpu-mem", "77"], "--gpu-mem 77 is no size that is known: give --gpu-mem as one of 24 (RTX4090)"),
        (["--device", "h300"], "--device 'h300' (command line): one of auto, cpu, H200, H100"),
        (["--gpu-mem", "80", "--context", "500000"], "--context 500000: the model takes at most 131072 tokens"),
        (["--gpu-mem", "80", "--tp", "3"], "--tp 3 does not fit a model of 32 attention heads and 8 key heads; deg"),
        (["--gpu-mem", "80", "--pp", "33"], "--pp 33 is more pipeline stages than the model has layers (32)"),
        (["--gpu-mem", "80", "--tp", "2"], "--tp 2 does not divide the 1 ranks"),
        (
            ["--gpu-mem", "80", "--gpus", "33", "--dp", "1"],
            "33 ranks cannot share Llama-3.1-8B with --dp 1: tensor degrees that its heads allow are 1, 2, 4, 8, 16, "
            "32, pipeline stages at most 32, and all together must divide the ranks",
        ),
        (["--gpu-mem", "80", "--gpus", "0"], "--gpus '0' (command line): must be at least 1"),
        (
            ["--gpu-mem", "80", "--expert-memory", "9"],
            "unknown option --expert-memory: phalanx serve has it, but not this command; --help lists",
        ),
    ],
)
def test_complaints(fit, words, message):
    code, out, err = fit("Llama-3.1-8B", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"phalanx: {message}")


def test_no_directory(fit):
    for model, kind in (("no.gguf", "file"), ("/nowhere", "directory")):
        code, _, err = fit("", model, "--gpu-mem", "80")
        assert code == 3 and err.startswith(f"phalanx: model '{model}': ") and kind in err


@pytest.mark.long
@pytest.mark.parametrize(
    "name, fetched",
    [("Llama-3.1-8B", {"config.json"}), ("Qwen2.5-VL-7B", {"config.json", "preprocessor_config.json"})],
)
def test_a_hub_id(tmp_path, name, fetched):
    """config.json is fetched, and how the model takes images, and once."""
    files = {"config.json": json.dumps(CONFIGS[name]).encode(), "preprocessor_config.json": b"{}"}
    hub = fake_hub.Hub(files | {"model.safetensors": b"x"})
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PHALANX_"))}
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}

    def call(id):
        command = [sys.executable, "-m", "phalanx.launcher.cli", "fit", id, "--gpu-mem", "80"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    try:
        first = call("org/tiny")
        assert first.returncode == 0, first.stderr
        assert f"tiny: {CONFIGS[name]['model_type']}, 8." in first.stdout
        assert "serve --model org/tiny --d" in first.stdout
        resolved = {line.split()[1].rpartition("/")[2] for line in hub.seen if "/resolve/" in line}
        assert resolved - {"processor_config.json"} == fetched
        hub.seen.clear()
        assert call("org/tiny").stdout == first.stdout
        assert not hub.seen
        for processor in tmp_path.rglob("preprocessor_config.json"):  # as of a download that was interrupted
            processor.unlink()
        assert call("org/tiny").stdout == first.stdout
        assert any("/preprocessor_config.json" in line for line in hub.seen) == (fetched > {"config.json"})
        none = call("org/none")
        assert (none.returncode, none.stdout) == (3, "")
        assert "model 'org/none':" in none.stderr
        assert f"{hub.url}; a private" in none.stderr
    finally:
        hub.close()


def test_a_gguf_file_of_a_directory_or_of_the_hub(fit, tmp_path, monkeypatch):
    """A file that is not in the hub's cache is not fetched for its header."""
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=1)
    file = gguf_files.write(source, tmp_path / "tiny.gguf", "F16")
    whole = fit("", str(file), "--gpu-mem", "80")
    assert whole[0] == 0
    assert f" --model {file} --d 0 " in whole[1]
    assert fit("", "--w", str(tmp_path), "--f", file.name, "--gpu-mem", "80") == whole
    assert fit("", "--f", str(file), "--gpu-mem", "80") == whole
    cached = {"tiny.gguf": str(file)}
    monkeypatch.setattr(hf_hub, "_cached_files", lambda id, names: cached.get(names[0], ""))
    assert fit("", "--m", "org/tiny", "--f", "tiny.gguf", "--gpu-mem", "80") == whole
    code, _, err = fit("", "--m", "org/tiny", "--f", "none.gguf", "--gpu-mem", "80")
    assert code == 3 and "pull org/tiny --f none.gguf" in err
    for file, message, expected in (
        ("none.gguf", f"model '{tmp_path}/none.gguf': there is no such file", 3),
        ("model.safetensors", "a file that ends with .gguf is needed", 2),
    ):
        code, _, err = fit("", "--w", str(tmp_path), "--f", file, "--gpu-mem", "80")
        assert code == expected and message in err


def test_the_tower_of_a_gguf_file(fit, tmp_path, monkeypatch):
    """It is measured with the model, and in the command."""
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=1)
    file, tower = gguf_files.write(source, tmp_path / "tiny.gguf", "F16"), tmp_path / "mm.gguf"
    tower.touch()
    asked = []
    monkeypatch.setattr(
        measured, "ask", lambda one: asked.append(one.mmproj) or ask(msgspec.structs.replace(one, mmproj=""))
    )
    code, out, _ = fit("", str(file), "--gpu-mem", "80", "--mmproj", str(tower))
    assert code == 0 and f"--mmproj {tower}" in out and asked == [str(tower)]
    for words in ((str(file), "--mmproj", "none.gguf"), (str(source), "--mmproj", str(tower))):
        code, _, err = fit("", *words, "--gpu-mem", "80")
        assert code == 2 and "--mmproj" in err


def test_images(fit):
    """Their tokens fill the context, and the tower's time is a prompt's."""
    words = "Qwen2.5-VL-7B", "--gpu-mem", "80"
    plain, shown = (json.loads(fit(*words, *more, "--json")[1]) for more in ((), ("--images", "5")))
    usual, largest = (plain["model"]["images"][size] for size in ("usual", "largest"))
    assert usual["height"] == usual["width"] and usual["tokens"] == usual["height"] * usual["width"] // 28**2
    assert usual["tokens"] <= largest["tokens"] <= 1280  # which config.json alone allows
    asked = shown["asked"]
    assert asked["images"] == 5 and asked["length"] == 5 * usual["tokens"]
    rates = [one["layouts"][0]["prefill_tokens_per_s"] for one in (plain, shown)]
    assert rates[1] < rates[0] and shown["command"][0].endswith(" --images-per-prompt 5")
    (line,) = [line for line in fit(*words)[1].splitlines() if line.startswith("An image of ")]
    count = usual["tokens"]
    assert f" {count} tokens" in line and f" {count * 57344 / 1e9:.4f} GB" in line
    for model, count, message in (
        ("Qwen2.5-VL-7B", "7", f"{7 * usual['tokens']} together"),
        ("Llama-3.1-8B", "1", "text alone"),
    ):
        code, _, err = fit(model, *words[1:], "--images", count)
        assert code == 2 and "--images" in err and message in err


def test_foreign_flags_are_answered(fit):
    code, _, err = fit("Llama-3.1-8B", "--gpu-mem", "80", "--trust-remote-code")
    assert code == 0
    assert "--trust-remote-code has no effect" in err


def test_it_loads_nothing_heavy(tmp_path):
    path = write(tmp_path / "m", CONFIGS["Llama-3.1-8B"])
    code = (
        f"import sys; from phalanx.launcher import cli; cli.main(['fit', {str(path)!r}, '--gpu-mem', '80']);"
        "print(*({'torch', 'mpi4py', 'cupy', 'tornado', 'numpy', 'safetensors'} & set(sys.modules)), 'heavy')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy", done.stderr
