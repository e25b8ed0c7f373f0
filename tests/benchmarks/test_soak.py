"""benchmarks/soak.py: a small soak of a live server that stays flat, and what is made of its samples."""

import json
import random

import pytest
from phalanx.benchmarks import soak

from .. import retries

pytestmark = retries.CLOCKS


def sample(requests, **changes):
    kinds = {what: {"rank 0": 3} for what in soak.TOLERANCE} | {
        "memory": {"rank 0": 300e6}, "blocks": {"used": 0}, "processes": {"rank 0": 1},
    }  # fmt: skip
    return {"requests": requests, **kinds, **changes}


def found(samples, name):
    return soak.growth(samples, 0.05)[name]


def test_a_leak_is_found_behind_noise_and_outliers():
    dice = random.Random(0)

    def memory(leak):
        jumps = (40e6 if number % 10 == 0 else 0 for number in range(100))
        return [sample(500 * i, memory={"rank 0": 300e6 + leak * 500 * i + dice.random() * 5e6 + jump})
                for i, jump in enumerate(jumps)]  # fmt: skip

    flat, leaking = (found(memory(leak), "memory rank 0") for leak in (0, 400))
    assert flat["flat"] and abs(flat["grew"]) < 1e6
    assert not leaking["flat"] and leaking["grew"] == pytest.approx(400 * 500 * 94, rel=0.1)


def test_what_fills_at_first_is_no_leak():
    samples = [sample(500 * i, memory={"rank 0": 300e6 if i > 4 else 100e6}) for i in range(100)]
    assert found(samples, "memory rank 0")["flat"]


def test_a_pool_that_fills_is_no_leak():
    samples = [
        sample(500 * i, memory={"rank 0": 50e6 * n}, processes={"rank 0": n})
        for i in range(100)
        for n in [4 + (i > 60)]
    ]
    assert found(samples, "memory rank 0")["flat"] and found(samples, "processes rank 0")["flat"]


def test_one_block_in_use_while_nothing_runs_is_one_too_many():
    samples = [sample(500 * i, blocks={"used": int(i == 70)}) for i in range(100)]
    assert not found(samples, "blocks used")["flat"]


def test_a_descriptor_now_and_then_is_a_leak():
    samples = [sample(500 * i, files={"rank 0": 20 + i // 10}) for i in range(100)]
    assert not found(samples, "files rank 0")["flat"] and found(samples, "threads rank 0")["flat"]


def test_files_add_up(tmp_path, capsys):
    """A slice that is not flat is the sum's fault. The second half is that of the longest slice."""

    def slice(count, leak, why):
        samples = [sample(500 * i, memory={"rank 0": 300e6 + leak * 500 * i}) for i in range(count // 500 + 1)]
        return {"asked": count, "seconds": 1800, "models": 1, "warm": 0.05, "kinds": {"chat": count - 1, "batch": 1},
                "failures": {}, "left": [], "samples": samples, "why": why}  # fmt: skip

    files = [tmp_path / "a.json", tmp_path / "b.json"]
    slices = [[slice(10_000, 50, [])], [slice(5000, 4000, ["memory rank 0 grew"]), slice(5000, 0, [])]]
    for file, given in zip(files, slices, strict=True):
        file.write_text(json.dumps({"requests": 1_000_000, "slices": given}))
    assert soak.main([str(files[0]), "--table"]) == 0
    capsys.readouterr()
    assert soak.main([*map(str, files), "--table"]) == 1
    said = capsys.readouterr().out.split("20000 requests in 1.5 h, 3 slices")[1]
    assert "chat 19997" in said
    (row,) = [line for line in said.splitlines() if line.startswith("| memory rank 0")]
    assert [word.strip() for word in row.split("|")[3:6]] == ["18.00", "2 of 3", "0.25"]
    with pytest.raises(SystemExit):
        soak.main([str(files[0]), str(tmp_path / "c.json"), "--table"])
    assert "c.json" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_small_soak_is_flat(tmp_path, capsys):
    """Two slices: each goes on in the same file, with a server of its own."""
    given = [str(tmp_path / "run.json"), "--requests", "1900", "--round", "100", "--warm", "0.3", "--start", "300"]
    assert soak.main([*given, "--slice", "1600"]) == 0, capsys.readouterr().out
    # Processes begin anew with each turn of a model: of three samples the last one is looked at alone.
    assert soak.main([*given, "--models", "2", "--warm", "0.9"]) == 0, capsys.readouterr().out
    run = json.loads((tmp_path / "run.json").read_text())
    first, second = run["slices"]
    assert soak.done(run) >= 1900
    assert first["asked"] >= 1600
    assert not first["failures"] | second["failures"]
    kinds = {"chat", "stream", "leave", "tool", "schema", "pattern", "logprobs", "embed", "response", "message"}
    assert kinds | {"batch line"} <= first["kinds"].keys()
    assert kinds <= second["kinds"].keys()
