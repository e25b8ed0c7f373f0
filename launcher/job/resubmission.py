"""How a job submits its successor: the same job again in Slurm, or a command of the user's in any batch system.

Sources: the manual pages of scontrol (`show job`: Command, SubmitLine, EndTime; `write batch_script`), sbatch, qstat
(`-f`: stime, Resource_List.walltime; Torque's start_time), bjobs (time_left) and flux-jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from ...errors import USAGE, FatalError
from ...rank.options import Options
from ...rank.server import server_registry
from ...rank.server.config import PREDECESSOR, SERVICE, HandoverConfig
from ..options import option_sources
from . import job_end, mpi_env, secret_variables

PATIENCE = 30.0  # seconds for a command of the batch system
SHARE, MOST = 3, 1800.0  # the successor is submitted a third of the time before the end, at most so many seconds
LAST = 60.0  # seconds before the end at which nothing runs any more; a quarter of that time where that is less
# Options of sbatch that are this job's own: the successor has another dependency, begin or script, is not held, and is
# submitted at once by a command that prints its number.
_WITH_VALUE = re.compile(r"--(?:dependency|begin|wrap|array)|-[dba]")
_OWN = re.compile(
    r"--(?:dependency|begin|wrap|array)(?:=.*)?|-[dba].*|--(?:wait|test-only|parsable|hold|quiet)|-[WHQ]+", re.DOTALL
)
_HANDED_ON = (PREDECESSOR, SERVICE)  # variables that a successor needs
# Jobs that have ended are listed, too. A job of `flux batch` is a Flux of its own, whose parent has its successor.
_FLUX_LOOK = (
    'state=$(flux --parent jobs --no-header -o \'{{state}}\' "$1") || exit; [ "$state" = INACTIVE ] || echo "$state"'
)
# Whether a job is still there: a command whose output is not empty, or that fails where the batch system does.
_LOOKS = {
    "SLURM_JOB_ID": ["squeue", "--noheader", "--jobs", "{job}", "--format", "%T"],
    "PBS_JOBID": ["qstat", "{job}"],
    "LSB_JOBID": ["bjobs", "-noheader", "-o", "stat", "{job}"],
    "FLUX_JOB_ID": ["/bin/sh", "-c", _FLUX_LOOK, "sh", "{job}"],
}


def plan(options: Options, environ: Mapping[str, str], now: float) -> HandoverConfig | None:
    """How and when to hand over; None without --resubmit. Raises FatalError where that cannot be known."""
    if not options.resubmit:
        for name, value in (("--resubmit-command", options.resubmit_command), ("--handover", options.handover)):
            if value:
                raise FatalError(f"{name} {value} is for --resubmit, which is not given", USAGE)
        return None
    clean = environment(environ) | {SERVICE: service(environ)}
    end, left = job_end.end_time(options.time_left, environ, now, "--time-left")
    asks = "SLURM_JOB_ID" in environ and not (options.resubmit_command and end)
    told = _scontrol(environ, clean) if asks else {}
    if not end and (found := _local_time(told.get("EndTime", "")) or _asked_end(environ, clean, now)) > now:
        end, left = found, found - now
    if not end:
        raise FatalError("--resubmit: nothing tells when this job is ended: give --time-left, such as 4h", USAGE)
    lead = options.handover or min(left / SHARE, MOST)
    if lead >= left:
        raise FatalError(f"--handover {lead:g}: only {left:.0f} s are left: give fewer", USAGE)
    last = min(LAST, lead / 4)
    command, script = _command(options, environ, told, clean)
    look = next((words for name, words in _LOOKS.items() if name in environ), [])
    return HandoverConfig(
        command=command,
        script=script,
        look=look,
        directory=told.get("WorkDir") or os.getcwd(),
        environ=clean,
        end=end,
        submit_at=end - lead,
        drain_at=end - 2 * last,
        stop_at=end - last,
    )


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a batch system's commands, which a new job inherits: without this job's own variables."""
    kept = mpi_env.without_mpi(environ)
    own = (*option_sources.INTERNAL, *secret_variables.NAMES)
    return {
        name: value
        for name, value in kept.items()
        if (not name.startswith("SLURM") or name == "SLURM_CONF") and name not in own
    }


def service(environ: Mapping[str, str]) -> str:
    """The name that a job and its successors share: that of the first one."""
    given = environ.get(SERVICE, "")
    return given if re.fullmatch(r"\w[\w.-]{0,100}", given) else f"{mpi_env.hostname()}-{os.getpid()}"


def shared_key(options: Options, environ: Mapping[str, str]) -> str:
    """The API keys of this job and its successors, made or given: they are in a file for this user only.

    A successor would make another key, or lack one that was exported when the first job was submitted.
    """
    path = server_registry.directory().parent / "keys" / service(environ)
    server_registry.make_directory(path.parent)
    if not options.api_key and SERVICE in environ:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="utf-8").strip("\n")
    key = options.api_key or secrets.token_urlsafe(32)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(key + "\n")
    part.rename(path)
    return key


def _command(
    options: Options, environ: Mapping[str, str], told: dict[str, str], clean: Mapping[str, str]
) -> tuple[list[str], str]:
    """The words that submit the successor, and what they read from standard input."""
    if options.resubmit_command:
        return ["/bin/sh", "-c", options.resubmit_command], ""
    if not told:
        raise FatalError(
            "--resubmit: only Slurm tells what a job was submitted with; say how to submit the next one, such as "
            "--resubmit-command 'qsub job.sh'",
            USAGE,
        )
    job = environ["SLURM_JOB_ID"]
    script = _run(["scontrol", "write", "batch_script", job, "-"], clean)
    if not script.startswith("#!"):
        raise FatalError(f"--resubmit: Slurm has no script of job {job}: give --resubmit-command", USAGE)
    given, directives = submit_options(told.get("SubmitLine", ""), told.get("Command", "")), _directives(script)
    if any(word in ("--wait", "-W") for word in directives):
        raise FatalError(
            "--resubmit: the script has #SBATCH --wait, with which sbatch does not end before the job: leave it out",
            USAGE,
        )
    words = ["sbatch", "--parsable", *given]
    if names := _exported(given, directives, clean):
        words.append(f"--export={names}")
    if not any(word.startswith(("--job-name", "-J")) for word in words) and "SLURM_JOB_NAME" in environ:
        words.append(f"--job-name={environ['SLURM_JOB_NAME']}")
    if "SLURM_ARRAY_TASK_ID" in environ:
        words.append(f"--array={environ['SLURM_ARRAY_TASK_ID']}")
    return words, script


def submit_options(line: str, command: str) -> list[str]:
    """The options of the `sbatch` line that a job was submitted with; what follows its script is refused.

    command: the script as Slurm knows it.
    """
    words = _split(line)[1:]
    script = Path(command.split()[0]).name if command and command != "(null)" else ""
    at = next((i for i, word in enumerate(words) if script and Path(word).name == script), len(words))
    if words[at + 1 :]:
        raise FatalError(
            f"--resubmit: the script was given arguments ({' '.join(words[at + 1 :])}), which cannot be given again: "
            "say how to submit it by --resubmit-command",
            USAGE,
        )
    kept, skip = [], False
    for word in words[:at]:
        if skip:
            skip = False
        elif _OWN.fullmatch(word):
            skip = bool(_WITH_VALUE.fullmatch(word))
        else:
            kept.append(word)
    return kept


def _directives(script: str) -> list[str]:
    """The options in the #SBATCH lines of a script, which end at its first command."""
    words: list[str] = []
    for line in itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.splitlines()):
        if line.startswith("#SBATCH"):
            words += _split(line.removeprefix("#SBATCH"))
    return words


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _exported(given: list[str], directives: list[str], environ: Mapping[str, str]) -> str:
    """The names for --export where a job's own choice would keep from its successor what that needs; "" elsewhere.

    sbatch takes the command line before SBATCH_EXPORT, and that before the script. A list of names is handled like
    NONE, which it replaces: the user's own environment is loaded on the node.
    """
    inherited = [f"--export={environ['SBATCH_EXPORT']}"] if "SBATCH_EXPORT" in environ else []
    export = ""
    for words in (directives, inherited, given):
        for word, after in itertools.pairwise([*words, ""]):
            if word == "--export" or word.startswith("--export="):
                export = after if word == "--export" else word.partition("=")[2]
    names = export.split(",")
    if not export or "ALL" in export.upper().split(",") or set(names) >= set(_HANDED_ON):
        return ""
    kept = [name for name in names if name.upper() not in ("NONE", "NIL")]
    return ",".join([*kept, *(name for name in _HANDED_ON if name not in names)])


def _scontrol(environ: Mapping[str, str], clean: Mapping[str, str]) -> dict[str, str]:
    """Slurm's record of this job."""
    text = _run(["scontrol", "show", "job", environ["SLURM_JOB_ID"]], clean)
    # A value may have blanks, but each of these stands at the end of its line.
    lines = (line.strip().partition("=") for line in text.splitlines())
    found = {name: value for name, _, value in lines if name in ("Command", "SubmitLine", "WorkDir")}
    if ends := re.search(r"\bEndTime=(\S+)", text):
        found["EndTime"] = ends[1]
    return found


def _asked_end(environ: Mapping[str, str], clean: Mapping[str, str], now: float) -> float:
    """The end that PBS or LSF tells of this job, as Unix time; 0: none."""
    with contextlib.suppress(FatalError):
        if job := environ.get("PBS_JOBID"):
            return _pbs_end(_run(["qstat", "-f", job], clean))
        if job := environ.get("LSB_JOBID"):
            text = _run(["bjobs", "-noheader", "-o", "time_left", job], clean)
            if found := re.search(r"(\d+:\d+) L", text):  # hours and minutes; L: a limit, not an estimate
                return now + 60 * _seconds(found[1])
    return 0.0


def _pbs_end(text: str) -> float:
    """The end of a job that `qstat -f` shows."""
    started = re.search(r"^\s*(?:stime|start_time) = (.+?)\s*$", text, re.MULTILINE)
    limit = re.search(r"^\s*Resource_List\.walltime = ([\d:]+)", text, re.MULTILINE)
    if not (started and limit):
        return 0.0
    with contextlib.suppress(ValueError):
        return datetime.strptime(started[1], "%a %b %d %H:%M:%S %Y").timestamp() + _seconds(limit[1])
    return 0.0


def _seconds(text: str) -> float:
    """`4:00:00` as 14400."""
    seconds = 0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def _local_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _run(words: list[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FatalError(f"--resubmit: {' '.join(words)}: {error}", USAGE) from None
    if done.returncode:
        raise FatalError(f"--resubmit: {' '.join(words)}: {done.stderr.strip()[-300:]}", USAGE)
    return done.stdout
