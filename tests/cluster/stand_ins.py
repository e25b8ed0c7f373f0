"""Stand-ins for a batch system's commands: `install` puts them on a PATH, where the scripts of hostfiles/ find them.

A job's script runs here, with the environment that the batch system's manual promises, as a job of two nodes of eight
GPUs. What starts ranks there starts two on this host's CPUs. All calls are kept in a file.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = "sbatch", "srun", "scontrol", "qsub", "qstat", "bsub", "bjobs", "flux", "mpirun", "apptainer", "phalanx"
HOSTS = ["node1", "node2"]
GPUS = 8  # of each
LEFT = 3600  # seconds until the job's end


def install(place: Path, phalanx: str, mpirun: list[str]) -> dict[str, str]:
    """Programs in `place`; the environment in which they are found. phalanx, mpirun: the real ones."""
    for name in NAMES:
        program = place / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{__file__}" {name} "$@"\n')
        program.chmod(0o755)
    return {
        "PATH": f"{place}:{os.environ['PATH']}",
        "STANDS_FOR": json.dumps({"phalanx": phalanx, "mpirun": mpirun}),
        "CALLS": str(place / "calls"),
    }


def calls(place: Path) -> list[dict[str, Any]]:
    """All calls: name, words, pid, and what else was found."""
    path = place / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(name: str, words: list[str], **more: Any) -> None:
    with open(os.environ["CALLS"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "words": words, "pid": os.getpid(), **more}) + "\n")


def run_job(script: str, environ: dict[str, str]) -> int:
    return subprocess.run(["bash", "-c", script, "job"], env=os.environ | environ, check=False).returncode


# Commands that submit.


def sbatch(words: list[str]) -> int:
    text = Path(words[-1]).read_text(encoding="utf-8")
    keep("sbatch", words)
    nodes = ",".join(HOSTS) if "--nodes=2" in text else HOSTS[0]
    count = len(nodes.split(","))
    each = 4 if "--ntasks-per-node=4" in text else GPUS
    (Path(os.environ["CALLS"]).parent / "script").write_text(text, encoding="utf-8")
    environ = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NAME": "phalanx",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(count),
        "SLURM_NTASKS_PER_NODE": str(each),
        "SLURM_TASKS_PER_NODE": f"{each}(x{count})" if count > 1 else str(each),
        "SLURM_NTASKS": str(each * count),
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    if "--array" in text:
        environ |= {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "1"}
    return run_job(text, environ)


def scontrol(words: list[str]) -> int:
    keep("scontrol", words)
    if words[:2] == ["write", "batch_script"]:
        print((Path(os.environ["CALLS"]).parent / "script").read_text(encoding="utf-8"), end="")
    else:
        import datetime

        end = (datetime.datetime.now() + datetime.timedelta(seconds=LEFT)).isoformat(timespec="seconds")
        print(f"JobId={words[2]} JobName=phalanx\n   StartTime=x EndTime={end} Deadline=N/A")
        print(
            f"   Command=/x/job.sbatch\n   WorkDir={os.getcwd()}\n   SubmitLine=sbatch --export=ALL,A=b /x/job.sbatch"
        )
    return 0


def qsub(words: list[str]) -> int:
    keep("qsub", words, predecessor=os.environ.get("PHALANX_PREDECESSOR"))
    names = dict(one.split("=", 1) for one in words[words.index("-v") + 1].split(",") if "=" in one)
    if not names:  # a successor, which does not start here
        print("43.server")
        return 0
    nodefile = Path(os.environ["CALLS"]).parent / "nodefile"
    nodefile.write_text("".join(f"{host}\n" * GPUS for host in HOSTS), encoding="utf-8")
    place = {"PBS_JOBID": "42.server", "PBS_NODEFILE": str(nodefile), "PBS_O_WORKDIR": os.getcwd()}
    return run_job(Path(words[-1]).read_text(encoding="utf-8"), names | place)


def qstat(words: list[str]) -> int:
    keep("qstat", words)
    if words[0] == "-f":
        walltime = f"{LEFT // 3600:02}:00:00"
        print(f"Job Id: {words[1]}\n    Resource_List.walltime = {walltime}\n    stime = {time.ctime()}")
    else:
        print(words[0])
    return 0


def bjobs(words: list[str]) -> int:
    keep("bjobs", words)
    print(f"{LEFT // 3600}:{LEFT // 60 % 60:02} L" if "time_left" in words else "PEND")
    return 0


def bsub(words: list[str]) -> int:
    keep("bsub", words, predecessor=os.environ.get("PHALANX_PREDECESSOR"))
    if "PHALANX_PREDECESSOR" in os.environ:
        print("Job <43> is submitted to default queue <normal>.")
        return 0
    ranks = Path(os.environ["CALLS"]).parent / "rankfile"
    ranks.write_text("".join(f"{host}\n" * GPUS for host in HOSTS), encoding="utf-8")
    hosts = " ".join(f"{host} {GPUS}" for host in HOSTS)
    place = {"LSB_JOBID": "42", "LSB_DJOB_RANKFILE": str(ranks), "LSB_MCPU_HOSTS": hosts, "LSB_DJOB_NUMPROC": "16"}
    return run_job(sys.stdin.read(), place)


def flux(words: list[str]) -> int:
    keep("flux", words)
    words = [word for word in words if word != "--parent"]
    if words[0] == "batch" and "FLUX_URI" not in os.environ:
        return run_job(Path(words[-1]).read_text(encoding="utf-8"), {"FLUX_URI": "local:///run/flux/local"})
    if words[0] == "batch":  # a successor, which does not start here
        print("fM7Zq9AKHno")
    elif words[:2] == ["job", "timeleft"]:
        print(LEFT)
    elif words[:2] == ["job", "id"]:
        print(123456789 if words[2:] == ["--to=dec", "fM7Zq9AKHno"] else "")
    elif words[0] == "hostlist":
        print("node[1-2]")
    elif words[0] == "run":
        command = words[words.index("phalanx") :]
        size = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1"}
        start_ranks(command, size, {"FLUX_TASK_RANK": "RANK", "FLUX_TASK_LOCAL_ID": "LOCAL_RANK"})
    return 0


# Commands that start ranks.


def srun(words: list[str]) -> int:
    at = next(i for i, word in enumerate(words) if not word.startswith("-"))
    keep("srun", words, tasks=os.environ["SLURM_NTASKS"])
    size = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    size |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    start_ranks(words[at:], size | {"SLURM_NODEID": "0"}, {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK"})
    return 0


def mpirun(words: list[str]) -> int:
    at = words.index("phalanx")
    hosts = Path(words[words.index("-hostfile") + 1]).read_text(encoding="utf-8")
    slots = {line.split()[0]: int(line.split("slots=")[1]) for line in hosts.splitlines() if not line.startswith("#")}
    keep("mpirun", words, slots=slots, ranks=int(words[words.index("-np") + 1]))
    real = json.loads(os.environ["STANDS_FOR"])["mpirun"]
    os.execvp(real[0], [*real, *words[at:]])


def start_ranks(command: list[str], size: dict[str, str], each: dict[str, str]) -> None:
    """Two ranks that find their places in these variables alone: size is the same for all, each by Open MPI's names."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in size.items()]
    lines += [f"export {name}=$OMPI_COMM_WORLD_{source}" for name, source in each.items()]
    lines += ["unset ${!OMPI_COMM_WORLD_*}", 'exec "$@"']
    real = json.loads(os.environ["STANDS_FOR"])["mpirun"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    os.execvpe(real[0], [*real, "bash", "-c", "\n".join(lines), "rank", *command], environ)


def apptainer(words: list[str]) -> int:
    """The container's inside is the outside."""
    keep("apptainer", words)
    os.execvp("phalanx", words[words.index("phalanx") :])


def phalanx(words: list[str]) -> int:
    """The real one, on CPUs in the place of the script's GPUs, with the built-in model, and no port of its own."""
    keep("phalanx", words)
    real = json.loads(os.environ["STANDS_FOR"])["phalanx"]
    if words[0] == "serve":
        for name in ("--d", "--w", "--model", "--tp", "--pp"):
            if name in words:
                at = words.index(name)
                del words[at : at + 2]
        words += ["--device", "cpu", "--mem", "64", "--p", "0", "--tp", "2"]
    os.execv(real, [real, *words])


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
