"""`phalanx batch` before anything is started: what it refuses, the wall time, and the scripts for Slurm."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import phalanx
import pytest
from phalanx.errors import FatalError
from phalanx.launcher import cli
from phalanx.launcher.commands import batch
from phalanx.launcher.job import mpi_env, sbatch
from phalanx.launcher.options import option_sources
from phalanx.rank.options import Options

ROOT = Path(phalanx.__file__).resolve().parent
LINE = '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PHALANX_", "SLURM_", "OMPI_", "PMIX_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(LINE)
    return tmp_path


def refused(*argv, code=2):
    with pytest.raises(FatalError) as error:
        batch.main(argv)
    assert error.value.code == code
    return str(error.value)


def config(*argv, place=None):
    return batch.configure(option_sources.read(batch.BatchOptions, argv, {}).options, place)


def test_what_is_needed(place):
    assert refused().startswith("-i ")
    assert refused("-i", "in.jsonl").startswith("-o ")
    assert f"-i {place}/none:" in refused("-i", "none", "-o", "out")
    assert "-i is needed" not in refused("-i", str(place), "-o", "x/y")


def test_where_it_cannot_write(place):
    assert re.search("/dev/null.*regular", refused("-i", "in.jsonl", "-o", "/dev/null"))
    assert f"directory {place}/no" in refused("-i", "in.jsonl", "-o", "no/out")
    assert re.search("--summary /none/x.*directory", refused("-i", "in.jsonl", "-o", "o", "--summary", "/none/x"))
    if os.geteuid():
        (place / "shut").mkdir(mode=0o500)
        assert "the directory" in refused("-i", "in.jsonl", "-o", "shut/out")
    elif not os.access("/proc/self", os.W_OK):
        assert "cannot be written" in refused("-i", "in.jsonl", "-o", "/proc/self/out")


def test_files_that_are_the_same(place):
    words = "-i, -o, --errors and --summary have to be different files"
    assert refused("-i", "in.jsonl", "-o", "in.jsonl") == words
    assert refused("-i", "in.jsonl", "-o", "a", "--errors", "a") == words
    assert f"{place}/out.jsonl would be read" in refused("-i", ".", "-o", "out.jsonl")


def test_options_of_the_server(place, monkeypatch):
    argv = ("-i", "in.jsonl", "-o", "out")
    assert re.search("--p.*listens", refused(*argv, "--p", "3000"))
    assert re.search("--api-key.*listens", refused(*argv, "--api-key", "k"))
    monkeypatch.setenv("PHALANX_PORT", "3000")  # for another verb
    assert "no such directory" in refused("/none", *argv, code=3)


def test_an_output_that_is_there(place, capsys):
    argv = ("-i", "in.jsonl", "-o", "out.jsonl", "--load-format", "dummy")
    (place / "out.jsonl").write_text("my thesis\n")
    assert re.search(f"{place}/out.jsonl.*remove.*--overwrite", refused(*argv))
    (place / "out.jsonl").write_text('{"custom_id": "a"}\n')
    assert batch.main(argv) == 0
    assert f"phalanx: {place}/out.jsonl" in capsys.readouterr().err
    (place / "out.jsonl").unlink()
    (place / "out.errors.jsonl").write_text("")
    assert "out.errors.jsonl is there already" in refused(*argv)


def test_the_configuration(place):
    one = config("-i", "in.jsonl", "-o", "out.jsonl")
    assert (one.input, one.output, one.errors) == (
        f"{place}/in.jsonl",
        f"{place}/out.jsonl",
        f"{place}/out.errors.jsonl",
    )
    assert (one.journal, one.end_time, one.supervised) == (f"{place}/out.jsonl.journal", 0, True)
    assert config("-i", "in.jsonl", "-o", "answers").errors == f"{place}/answers.errors.jsonl"
    one = config("-i", "in.jsonl", "-o", "o", "--deadline", "100", place=mpi_env.RankPlacement(0, 2, 0, 2, "srun"))
    assert not one.supervised and one.reserve == pytest.approx(10, abs=0.1) and one.columns == 0
    assert config("-i", "in.jsonl", "-o", "o", "--deadline", "4h").reserve == 30
    assert config("-i", "in.jsonl", "-o", "o", "--deadline", "4h", "--reserve", "99").reserve == 99


def test_the_end_of_the_time():
    now = time.time()
    slurm = {"SLURM_JOB_END_TIME": str(int(now) + 100)}
    assert batch.end_time("", {}, now) == (0, 0)
    assert batch.end_time("", slurm, now)[1] == pytest.approx(100, abs=1)
    assert batch.end_time("none", slurm, now) == (0, 0)
    for text, seconds in (("50", 50), ("50s", 50), ("1.5m", 90), ("2h", 7200)):
        assert batch.end_time(text, slurm, now)[1] == pytest.approx(seconds)
    assert batch.end_time(str(int(now) + 60), {}, now)[1] == pytest.approx(60, abs=1)
    later = datetime.fromtimestamp(now + 3600).isoformat(timespec="seconds")
    assert batch.end_time(later, {}, now)[1] == pytest.approx(3600, abs=1)
    with pytest.raises(FatalError, match="--deadline 2020-01-01T00:00.*over"):
        batch.end_time("2020-01-01T00:00", {}, now)
    with pytest.raises(FatalError, match="SLURM_JOB_END_TIME is over already"):
        batch.end_time("", {"SLURM_JOB_END_TIME": "1000"}, now)
    with pytest.raises(FatalError, match="--deadline 'soon': .*30m"):
        batch.end_time("soon", {}, now)


def test_the_gpus_that_are_measured(monkeypatch):
    monkeypatch.setattr(mpi_env, "gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert batch.measured(Options(device="cpu"), 2) == []
    assert batch.measured(Options(), 2) == ["0", "1"]
    assert batch.measured(Options(devices=(3, 1)), 2) == ["3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert batch.measured(Options(devices=(2, 0)), 2) == ["GPU-c", "GPU-a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # this rank's own: those of the others it does not know
    assert batch.measured(Options(), 2) == []
    assert batch.measured(Options(), 1) == ["2"]
    monkeypatch.setattr(mpi_env, "gpus", lambda: 0)
    assert batch.measured(Options(), 2) == []


# Scripts for Slurm.


def run_script(place, script, *codes, signal=False, restarts="0"):
    """Run a script with an srun that ends with these codes; what srun and scontrol were told."""
    tools = place / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(
        '#!/bin/bash\necho "srun $*" >> told\ntrap "echo usr1 >> told; sleep 0.3; exit $CODE" USR1\necho > started\n'
        'if [ -n "$WAITS" ]; then while :; do sleep 0.05; done; fi\nexit $CODE\n'
    )
    (tools / "scontrol").write_text('#!/bin/bash\necho "scontrol $*" >> told\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    told = place / "told"
    found = []
    for code in codes:
        for name in ("told", "started"):
            (place / name).unlink(missing_ok=True)
        environ = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": restarts, "WAITS": "1" if signal else "",
        }  # fmt: skip
        job = subprocess.Popen(["bash", str(script)], cwd=place, env=environ, start_new_session=True)
        try:
            if signal:
                deadline = time.monotonic() + 10
                while not (place / "started").exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(0.2)  # 0.2 s are enough for the script to come to its wait
                job.send_signal(10)
            assert job.wait(10) == code
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, 9)
            job.wait()
        found.append(told.read_text().splitlines()[1:])
    return found


def script_of(verb, *argv, options=batch.BatchOptions, environ=None):
    return sbatch.script(verb, option_sources.read(options, argv, environ or {}))


def test_the_example_is_what_sbatch_prints():
    text = (ROOT / "hostfiles/slurm-batch.sh").read_text()
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    words = shlex.split(line.removesuffix("&"))[4:]
    assert script_of("batch", *words) == text


def test_a_batch_script_requeues_itself(place):
    script = ROOT / "hostfiles/slurm-batch.sh"
    requeue = ["scontrol requeue 7"]
    assert run_script(place, script, 0, 1, 2, 75, 70, 71, 137, 130) == [
        [], [], [], requeue, requeue, requeue, requeue, [],
    ]  # fmt: skip
    assert run_script(place, script, 75, 70, restarts="20") == [requeue, []]


def test_a_batch_script_passes_the_warning_on(place):
    script = ROOT / "hostfiles/slurm-batch.sh"
    assert run_script(place, script, 75, 0, signal=True) == [["usr1", "scontrol requeue 7"], ["usr1"]]


def test_a_script_for_a_server(place, capsys):
    argv = ["serve", "/m", "--np", "4", "--d", "0,1", "--restarts", "3", "--api-key", "hush", "--no-prefix-cache",
            "--temperature", "0.5", "--sbatch"]  # fmt: skip
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --ntasks-per-node=2" in text
    command = "phalanx serve --model /m --d 0,1 --tp 2 --pp 2 --disable-prefix-cache --temperature 0.5 &"
    assert f"srun --mpi=pmix {command}\n" in text
    note = "# The key is not written here: export PHALANX_API_KEY before sbatch, or give --api-key-file.\n"
    assert "hush" not in text and note in text
    assert note not in script_of("serve", "--api-key-file", "key", options=Options)
    (place / "script").write_text(text)
    assert run_script(place, place / "script", 0, signal=True) == [["usr1"]]
    requeue = ["scontrol requeue 7"]
    assert run_script(place, place / "script", 0, 1, 3, 71, 137) == [[], [], [], requeue, requeue]
    assert run_script(place, place / "script", 70, restarts="3") == [[]]


def test_scripts_for_other_machines():
    assert "gpus" not in script_of("batch", "--device", "cpu", "--np", "4", "-i", "a b", "-o", "c")
    assert "--input 'a b'" in script_of("batch", "-i", "a b", "-o", "c")
    assert "--nodes=1\n" in script_of("batch", "--tp", "4", "--d", "0,1,2,3", "-i", "a", "-o", "c")
    assert "--port 2100" in script_of("serve", options=Options, environ={"PHALANX_PORT": "2100"})
    with pytest.raises(FatalError, match="--sbatch: 6 ranks .*nodes of 4"):
        script_of("serve", "--np", "6", "--d", "0,1,2,3", options=Options)
    with pytest.raises(FatalError) as stop:
        script_of("serve", "--np", "4", "--d", "2,3", options=Options)
    assert "--sbatch: --d 2,3 names" in str(stop.value)
    assert "0; write --d 0,1" in str(stop.value)


def test_sbatch_of_batch_refuses_what_batch_refuses(place):
    assert "is for `phalanx serve`" in refused("-i", "a", "-o", "b", "--p", "1", "--sbatch")


STOPPED_TWICE = """
import os, subprocess, sys, threading, time, signal
from phalanx.launcher.job import supervisor as supervise
from phalanx.launcher.commands import batch
server = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit({})); print(flush=True)"
server = server.format(sys.argv[1]) + "; time.sleep(20)"
server = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, stderr=2)
server.stdout.readline()
ranks = [sys.executable, "-c", "import time; time.sleep(20)"]
job = batch.Supervisor(supervise.LaunchSpec(ranks, dict(os.environ), False), server)
job._send_drain = lambda: os.kill(os.getpid(), signal.SIGTERM)  # the second, when the first has been heard
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
sys.exit(job.run())
"""


@pytest.mark.parametrize(("said", "code"), [(130, 130), (75, 75), (0, 0), (70, 130)])
def test_stopped_while_the_jobs_process_ends(said, code):
    """The job ends with the code that it has sent; where it sends none, a job that is stopped was stopped."""
    done = subprocess.run([sys.executable, "-c", STOPPED_TWICE, str(said)], capture_output=True, text=True, timeout=30)
    assert done.returncode == code, done.stderr
