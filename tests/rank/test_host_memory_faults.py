"""A fault of host memory ends the job with a message, with the code of docs/exit-codes.md, and leaves nothing."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from phalanx import errors
from phalanx.rank import protocol

from .. import retries
from ..checkpoints import make_checkpoint, write_tokenizer
from ..engine import Engine, greedy
from ..processes import gone
from .model.test_architectures import MODELS, write
from .test_loading import ended
from .test_swapping import COUNT, OPTIONS, SIZES, prompt

pytestmark = [pytest.mark.timeout(240), retries.KILLS]

HOST = socket.gethostname()
FAULTY = (str(Path(__file__).parent / "faulty.py"),)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("experts"), **MODELS["qwen3_moe"])


def refused(model, monkeypatch, fault: str, **options) -> str:
    """The one line of a job of two ranks that does not come up for lack of memory."""
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(AssertionError, match=f"exit code {errors.MEMORY}") as caught:
        Engine(model, 2, program=FAULTY, device="cpu", **options)  # CUDA alone takes all of an address space
    (line,) = re.findall("^phalanx: (.* not enough memory .*)$", str(caught.value), re.MULTILINE)
    assert "Traceback" not in str(caught.value)
    return line


LIMITED = r"the system refuses \d+\.\d MB of host memory under a limit of \d+ MB \(ulimit -v\)"


@pytest.mark.long
def test_host_blocks_that_the_system_refuses(tmp_path, monkeypatch):
    model = make_checkpoint(tmp_path / "ckpt", "qwen3", tokenizer=False, **SIZES)
    line = refused(model, monkeypatch, "limit:1:8", kvcache_mem_cpu=256, **OPTIONS)
    start = f"rank 1 on {re.escape(HOST)}: not enough memory for --kvcache-mem-cpu 256: "
    assert re.fullmatch(f"{start}{LIMITED}.*", line), line


@pytest.mark.long
def test_memory_that_cannot_be_locked(experts, monkeypatch):
    """Each rank says so once, whatever it cannot pin, and serves as ever: experts in host memory, swapped blocks."""
    monkeypatch.setenv("FAULT", "pin:0:1")
    options = dict(device="cpu", num_experts_offload_per_rank=3, **OPTIONS)
    tokens = []
    for more in (dict(), dict(ranks=2, tp=2, program=FAULTY, mem=1, kvcache_mem_cpu=8)):
        with Engine(experts, **more, **options) as engine:
            outputs = engine.generate({str(i): (prompt(i), greedy(COUNT)) for i in range(4)})
            tokens.append([one.tokens for one in outputs.values()])
            said = re.findall(r"host memory cannot be pinned \(CUDA error 2; \S+ MB may be locked\)", engine.log())
            assert len(said) == more.get("ranks", 0), engine.log()
            assert engine.drain() == 0
    assert tokens[0] == tokens[1]


def cgroup(root: Path, mb: int) -> str:
    """Folders of a job's cgroup that leaves so many MB, to the step that the rank is in by its parent alone."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    for name, limit in (("slurm/job_7", str((300 + mb) << 20)), ("slurm/job_7/step_0", "max")):
        place = root / "sys/fs/cgroup" / name
        place.mkdir(parents=True)
        for file, text in (("max", limit), ("current", str(310 << 20)), ("stat", f"inactive_file {10 << 20}")):
            (place / f"memory.{file}").write_text(f"{text}\n")
    return str(root)


def test_what_a_cgroup_does_not_leave_is_refused(experts, tmp_path, monkeypatch):
    """Experts of 16 MB a rank: before the kernel kills it."""
    config = json.loads((experts / "config.json").read_text()) | {"moe_intermediate_size": 1 << 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("CGROUPS", cgroup(tmp_path / "cgroups", 5))
    monkeypatch.setenv("FAULT", "cgroup:1:0")
    with pytest.raises(AssertionError, match=f"exit code {errors.MEMORY}") as caught:
        Engine(tmp_path, 2, program=FAULTY, device="cpu", load_format="dummy", tp=2, num_experts_offload_per_rank=3)
    said = re.findall(r"this rank's weights take \S+ GB, but for it (\S+) GB are free", str(caught.value))
    assert said == ["0.00"], str(caught.value)  # 5 MB, for two ranks
    assert "Traceback" not in str(caught.value)


@pytest.mark.long
def test_experts_that_the_system_refuses(experts, tmp_path, monkeypatch):
    config = json.loads((experts / "config.json").read_text()) | {"moe_intermediate_size": 1 << 15}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = refused(tmp_path, monkeypatch, "limit:1:8", load_format="dummy", num_experts_offload_per_rank=3)
    start = f"rank 1 on {re.escape(HOST)}: not enough memory for the weights: "
    assert re.match(start + LIMITED, line), line
    assert "GPUs (--num-experts-offload-per-rank, --expert-memory)" in line


@pytest.mark.long
def test_a_rank_killed_while_it_swaps(tmp_path, monkeypatch):
    """In the middle of a plan's copies, with others to come."""
    monkeypatch.setenv("FAULT", "swap:1:3")
    model = make_checkpoint(tmp_path / "ckpt", "qwen3", seed=3, tokenizer=False, **SIZES)
    with Engine(model, 2, program=FAULTY, tp=2, mem=1, kvcache_mem_cpu=8, **OPTIONS) as engine:
        sent = [protocol.Request(str(i), protocol.pack_u32(prompt(i)), greedy(COUNT)) for i in range(12)]
        engine.send(*sent)
        assert engine.wait(30) == errors.RANK_KILLED
        assert engine.fatal is not None and f"{HOST} has died" in engine.fatal.message
        assert gone(engine.ready.pids)


@pytest.mark.long
def test_a_truncated_file_of_experts(experts, tmp_path):
    copy = Path(shutil.copytree(experts, tmp_path / "copy"))
    write_tokenizer(copy)
    file = copy / "model.safetensors"
    whole = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(whole - 100)
    said = ended(copy, "--num-experts-offload-per-rank", "3")
    assert f"{whole} bytes," in said


@pytest.fixture
def slow(experts, monkeypatch):
    """A job whose steps take 4 s, where --timeout is 3; its rank 1 hangs at a step."""

    def start(step: int) -> Engine:
        monkeypatch.setenv("FAULT", f"experts:1:{step}")
        options = dict(tp=2, device="cpu", timeout=3, max_num_batched_tokens=32, num_experts_offload_per_rank=100)
        return Engine(experts, 2, program=FAULTY, **options)

    return start


@pytest.mark.long
@pytest.mark.alone
def test_slow_experts_are_no_hang(slow):
    with slow(1000) as engine:
        assert re.search(r"4\.0 s.*experts.* 12\.0 s", engine.log())
        assert len(engine.generate({"one": ([5, 6], greedy(2))})["one"].tokens) == 2
        assert engine.drain() == 0


@pytest.mark.long
@pytest.mark.alone
def test_a_rank_that_hangs_beside_slow_experts_is_named(slow):
    with slow(1) as engine:
        engine.send(protocol.Request("one", protocol.pack_u32([5, 6]), greedy(4)))
        assert engine.wait(30) == errors.RANK_STUCK
        assert f"rank 1 on {HOST}." in engine.log()
        assert gone(engine.ready.pids)
