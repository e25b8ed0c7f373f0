"""hostfiles/: the scripts for Slurm, PBS, LSF and Flux run as they are, with stand-ins for what the cluster has."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import phalanx
import pytest
import yaml
from phalanx.errors import FatalError
from phalanx.launcher.job import sbatch
from phalanx.launcher.options import option_sources
from phalanx.rank.options import Options

from . import directives

HOSTFILES = Path(phalanx.__file__).resolve().parent / "hostfiles"
SCRIPTS = sorted(path.name for path in HOSTFILES.iterdir() if path.suffix in (".sh", ".sbatch"))

# The job: notes its arguments, and ends with $CODE; with $WAITS only when it is asked to, after a moment.
JOB = """#!/bin/bash
trap 'echo usr1 >> told; sleep 0.3; exit $CODE' USR1
echo "$(basename "$0") $*" >> told
touch started
while [ -n "$WAITS" ]; do sleep 0.02; done
exit "$CODE"
"""
PHALANX = '#!/bin/bash\necho "phalanx $*" >> told\ntouch "${@: -1}"\nexit "${HOSTFILE_CODE:-0}"\n'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A directory with the stand-ins; starts a script there."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"srun": JOB, "mpirun": JOB, "phalanx": PHALANX}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    jobs = []

    def start(script, **environ):
        given = {"PATH": f"{tools}:{os.environ['PATH']}", "MODEL": "/m o d e l", "CODE": "0", "WAITS": ""}
        given |= {"PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "42.pbs", "LSB_JOBID": "42", "SLURM_JOB_ID": "42"}
        given["PHALANX_API_KEY_FILE"] = "/keys"
        script = script if isinstance(script, Path) else HOSTFILES / script
        job = subprocess.Popen(
            ["bash", str(script)], cwd=tmp_path, env=os.environ | given | environ, start_new_session=True
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def told(place: Path) -> list[str]:
    return (place / "told").read_text().splitlines()


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_script_is_one_for_bash():
    assert len(SCRIPTS) == 10
    for name in SCRIPTS:
        done = subprocess.run(["bash", "-n", HOSTFILES / name], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck(tmp_path):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed; make install-test does that")
    argv = ["/a 'b", "--np", "4", "--d", "0,1", "--temperature", "0.5"]
    (tmp_path / "printed").write_text(sbatch.script("serve", option_sources.read(Options, argv, {})))
    files = [*(HOSTFILES / name for name in SCRIPTS), tmp_path / "printed"]
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-one-node.sbatch"])
def test_examples_for_slurm_are_what_sbatch_prints(name):
    text = (HOSTFILES / name).read_text()
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    words = shlex.split(line.removesuffix("&"))[4:]
    assert sbatch.script("serve", option_sources.read(Options, words, {})) == text


@pytest.mark.parametrize("name", SCRIPTS)
def test_directives_are_those_of_the_batch_system(name):
    sentinel, options = directives.read((HOSTFILES / name).read_text())
    limits = {"#SBATCH": "--time", "#PBS": "-l", "#BSUB": "-W", "# flux:": "--time-limit"}
    assert limits[sentinel] in options and len(options) >= 3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("#SBATCH --node=2", "no such option"),
        ("#SBATCH --nodes", "expected"),
        ("#SBATCH --nodes=two", "expected"),
        ("#SBATCH --exclusive=8x", "expected no value"),
        ("#SBATCH --signal=USR1@2m", "expected"),
        ("#SBATCH --nodes=2\nset -e\n#SBATCH --time=10", "behind a command"),
        ("#SBATCH --nodes=2\n#SBATCH --nodes=3", "twice"),
        ("#PBS -l select=2:gpus=8", "resource"),
        ("#PBS -l place=alone", "place"),
        ("#PBS -l walltime=4h", "unknown"),
        ("#PBS --name x", "no such option"),
        ("#BSUB -W 4h", "expected"),
        ("#BSUB -gpu 8", "expected"),
        ("# flux: --tasks-per-node=8", "no such option"),
        ("# flux: -N2\n\n# flux: -t 4h", "behind a command"),
    ],
)
def test_wrong_directives_are_seen(text, word):
    with pytest.raises(ValueError, match=word):
        directives.read(f"#!/bin/bash\n{text}\n")


@pytest.mark.parametrize("name", ["pbs.sh", "lsf.sh"])
def test_the_allocation_becomes_a_hostfile(name, cluster, tmp_path):
    """Its code is the job's, and neither the file nor the clock stays behind."""
    assert cluster(name, CODE="71").wait(10) == 71
    hosts = f"phalanx-hosts-42{'.pbs' if name == 'pbs.sh' else ''}"
    assert told(tmp_path) == [
        f"phalanx hostfile --slots 8 --mpi openmpi -o {hosts}",
        f"mpirun -np 16 -hostfile {hosts} --bind-to none --map-by slot "
        "phalanx serve --model /m o d e l --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --port 2000",
    ]
    assert not (tmp_path / hosts).exists()
    (tmp_path / "told").unlink()
    assert cluster(name, HOSTFILE_CODE="2").wait(10) == 2  # no allocation: nothing is started
    assert len(told(tmp_path)) == 1


CLOCKS = "pbs.sh", "flux.sh", "slurm-service.sbatch"  # drain by a clock of their own


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in CLOCKS])
def test_a_warning_drains_however_often_it_comes(name, cluster, tmp_path):
    job = cluster(name, CODE="0", WAITS="1")
    until((tmp_path / "started").exists)
    time.sleep(0.2)  # 0.2 s are enough for the script to come to its wait
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.1)  # while it drains, which takes it 0.3 s
    job.send_signal(signal.SIGUSR1)
    assert job.wait(10) == 0
    assert "usr1" in told(tmp_path)


def test_pbs_drains_by_the_clock(cluster, tmp_path):
    """PBS sends no warning: the script's own clock does, here a short one."""
    text = (HOSTFILES / "pbs.sh").read_text()
    hours = int(re.search(r"walltime=0(\d):00:00", text)[1])
    assert f"sleep $(({hours} * 3600 - 120)) &" in text  # the clock is that of the walltime
    script = tmp_path / "pbs.sh"
    script.write_text(text.replace(f"$(({hours} * 3600 - 120))", "0.3"))
    assert cluster(script, CODE="0", WAITS="1").wait(10) == 0
    assert told(tmp_path)[-1] == "usr1"


def test_the_container_of_alps():
    """Its entries and hooks are those of the container engine's manual, and its values texts, as that wants them."""
    found = tomllib.loads((HOSTFILES / "alps.toml").read_text())
    assert found.keys() <= {
        "image",
        "mounts",
        "workdir",
        "entrypoint",
        "writable",
        "base_environment",
        "env",
        "annotations",
    }
    hooks = found["annotations"]["com"]["hooks"]
    assert hooks.keys() <= {"aws_ofi_nccl", "cxi", "ssh", "nvidia_cuda_mps"}
    assert hooks["aws_ofi_nccl"]["enabled"] == "true" and hooks["aws_ofi_nccl"].keys() == {"enabled", "variant"}
    assert all(isinstance(value, str) for value in (*found["env"].values(), found["image"], *found["mounts"]))
    assert found["workdir"] in (HOSTFILES / "apptainer.def").read_text()


def test_the_containers_definition():
    """Apptainer is not needed to see that its parts are scripts, and that make knows what it is asked."""
    text = (HOSTFILES / "apptainer.def").read_text()
    head, *parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    assert [line.split(":")[0] for line in head.splitlines() if not line.startswith("#") and line] == [
        "Bootstrap", "From",
    ]  # fmt: skip
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(sections) == ["arguments", "files", "post", "environment", "runscript", "test"]
    arguments = dict(line.strip().split("=") for line in sections["arguments"].split())
    script = re.sub(r"{{ (\w+) }}", lambda found: arguments[found[1]], sections["post"])
    for name, code in {**sections, "post": script}.items():
        if name not in ("arguments", "files"):
            done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, timeout=20)
            assert (done.returncode, done.stderr) == (0, ""), name
    makefile = (HOSTFILES.parent / "Makefile").read_text()
    for line in re.findall(r"make (install .*)", script):
        target, *variables = line.split()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert all(f"{one.split('=')[0]} " in makefile for one in variables)
    for command in re.findall(r"phalanx (serve [^\n]*)", head):
        option_sources.read(Options, shlex.split(command)[1:], {})


@pytest.mark.parametrize(
    ("argv", "nodes", "tasks"),
    [
        ((), 1, 1),
        (("--np", "4"), 1, 4),
        (("--tp", "4"), 1, 4),
        (("--tp", "4", "--pp", "2", "--dp", "2", "--d", "0,1,2,3"), 4, 4),
        (("--d", "0,1,2,3"), 1, 4),
        (("--tp", "2", "--d", "0,1,2,3"), 1, 2),
    ],
)
def test_nodes_and_tasks(argv, nodes, tasks):
    text = sbatch.script("serve", option_sources.read(Options, argv, {}))
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n#SBATCH --gpus-per-node={tasks}\n" in text


@pytest.mark.parametrize(
    ("argv", "nodes", "tasks", "command"),
    [
        (("--nodes", "2", "--d", "0,1,2,3"), 2, 4, "--d 0,1,2,3 --tp 4 --pp 2"),
        (("--nnodes=2", "--d", "0,1,2,3", "--tp", "4", "--dp", "2"), 2, 4, "--d 0,1,2,3 --tp 4 --dp 2"),
        (("--nodes", "2", "--tp", "4", "--pp", "2"), 2, 4, "--tp 4 --pp 2"),
        (("--np", "8", "--d", "0,1,2,3"), 2, 4, "--d 0,1,2,3 --tp 4 --pp 2"),
    ],
)
def test_several_nodes_have_a_tensor_group_each(argv, nodes, tasks, command):
    words, asked = sbatch.wanted([*argv, "--sbatch"])
    text = sbatch.script("serve", option_sources.read(Options, words, {}), asked)
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n" in text
    assert f"phalanx serve {command} &\n" in text


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--nodes", "2", "--d", "0,1,2,3", "--tp", "4"), "--tp 4 --pp 2"),
        (("--nodes", "3", "--tp", "4"), "--nodes 3"),
        (("--nodes", "two"), "'two'"),
        (("--nodes",), "--nodes"),
    ],
)
def test_nodes_that_do_not_fit_the_ranks(argv, word):
    with pytest.raises(FatalError, match=re.escape(word)) as stop:
        words, asked = sbatch.wanted([*argv, "--sbatch"])
        sbatch.script("serve", option_sources.read(Options, words, {}), asked)
    assert stop.value.code == 2


def test_nodes_without_a_script_are_mpiruns():
    assert sbatch.wanted(["--nodes", "2"]) == (["--nodes", "2"], None)
    with pytest.raises(FatalError, match="--nodes: .*--sbatch.*mpirun"):
        option_sources.read(Options, ["--nodes", "2"], {})


def test_devices_that_the_job_would_not_have():
    """Slurm gives as many GPUs as there are tasks on a node, and CUDA counts them from 0."""
    chosen = option_sources.read(Options, ("--d", "1,0"), {})
    assert "#SBATCH --gpus-per-node=2\n" in sbatch.script("serve", chosen)
    chosen = option_sources.read(Options, ("--d", "4,5", "--device", "cpu"), {})
    assert "--gpus-per-node" not in sbatch.script("serve", chosen)
    with pytest.raises(FatalError, match="--d 4,5 .* 2 .*--d 0,1") as stop:
        sbatch.script("serve", option_sources.read(Options, ("--d", "4,5"), {}))
    assert stop.value.code == 2


def test_the_job_of_kubernetes_adds_up():
    """Ranks, slots and GPUs are the same number, options are known, and the service finds the pod of rank 0."""
    job, service = yaml.safe_load_all((HOSTFILES / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    known = {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath", "launcherCreationPolicy",
             "mpiImplementation", "runLauncherAsWorker"}  # fmt: skip
    assert spec.keys() <= known
    launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    (starts,), (works,) = (one["template"]["spec"]["containers"] for one in (launcher, worker))
    words = starts["command"] + starts["args"]
    assert int(words[words.index("-np") + 1]) == spec["slotsPerWorker"] * worker["replicas"]
    assert words[words.index("-hostfile") + 1] == "/etc/mpi/hostfile"  # where the operator writes it
    options = option_sources.read(Options, words[words.index("serve") + 1 :], {}).options
    assert options.tp * options.pp == spec["slotsPerWorker"] * worker["replicas"]
    assert len(options.devices) == works["resources"]["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]
    volumes = {one["name"] for one in worker["template"]["spec"]["volumes"]}
    mounts = {one["mountPath"]: one["name"] for one in works["volumeMounts"]}
    assert set(mounts.values()) == volumes and mounts.keys() >= {"/dev/shm", "/models", "/keys"}
    labels = service["spec"]["selector"]
    assert labels["training.kubeflow.org/job-name"] == job["metadata"]["name"] != service["metadata"]["name"]
    assert labels["training.kubeflow.org/replica-index"] == "0"
    assert service["spec"]["ports"] == [{"port": options.port}]
