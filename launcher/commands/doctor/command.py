"""`phalanx doctor`: whether this machine or allocation would run Phalanx well, and what to do where it would not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from .... import child_python, errors
from ....rank.options import LONGEST, flag
from ...builtin_model import DIRECTORY as DEMO
from ...job import binding, linux, mpi_env, mpirun, secret_variables
from ...job.mpi_env import RankPlacement
from ...job.mpirun import Mpi
from ...options import option_sources
from ...options.help import options_help, show_config
from . import facts, host_checks, links, probe_report, software, speeds
from . import rank_probe as ranks_member
from .check import FAIL, OK, Check, worst
from .probe_report import ProbeReport

HELP = "look at ranks, MPI, devices, links, disks and versions, and say what to do"
USAGE = """phalanx doctor [DIR] [options]: look at ranks, MPI, devices, links, disks and versions, in under a minute

  phalanx doctor                                       this machine, with two ranks
  mpirun -np 16 -hostfile H … phalanx doctor DIR   the ranks of this line
"""
_GROUP = "Doctor"
MARGIN = 8.0  # seconds that mpirun may take beside the ranks' own
RANK_PROBE = ["-m", "phalanx.launcher.commands.doctor.rank_probe"]


class DoctorOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str,
        flag("--model", "--w", "--weight-path", "--m", group=_GROUP, metavar="DIR", positional=True,
             help="the model whose file system is measured; none: the built-in one"),
    ] = ""  # fmt: skip
    ranks: Annotated[
        int, flag("--np", "--ranks", group=_GROUP, metavar="N", low=0,
                  help="ranks to start; 0: one per device in --d, else 2"),
    ] = 0  # fmt: skip
    devices: Annotated[
        tuple[int, ...], flag("--d", "--devices", "--device-ids", group=_GROUP, metavar="0,1,..", low=0,
                              help="visible GPUs of each node, from 0; local rank i gets the i-th"),
    ] = ()  # fmt: skip
    device: Annotated[
        str, flag("--device", group=_GROUP, choices=("auto", "cpu", "cuda"), help="what ranks would compute on")
    ] = "auto"
    host: Annotated[str, flag("--host", "--h", group=_GROUP, metavar="HOST", help="where serve would listen")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, flag("--port", "--p", group=_GROUP, metavar="N", low=1, high=65535, help="and on which port")
    ] = 2000
    timeout: Annotated[
        float,
        flag("--timeout", group=_GROUP, metavar="S", low=1, high=LONGEST,
             help="seconds for the ranks to meet and measure"),
    ] = 30.0  # fmt: skip
    speeds: Annotated[
        bool, flag("--speeds", group=_GROUP, off=("--no-speeds",), help="do not measure this host's disk and cores")
    ] = True
    json: Annotated[bool, flag("--json", group=_GROUP, off=("--no-json",), help="print JSON")] = False


def main(argv: Sequence[str]) -> int:
    mpi_env.refuse_lonely_srun(os.environ)
    where = mpi_env.rank_placement(os.environ)
    first = where is None or where.rank == 0
    chosen = option_sources.read(DoctorOptions, argv, os.environ, strict=first)
    if chosen.help or chosen.show_config:
        if first:
            print(USAGE + options_help(DoctorOptions) if chosen.help else show_config(chosen))
        return 0
    options = chosen.options
    secret_variables.forget()
    if where is not None:
        return _as_rank(options, where)
    return _alone(options)


def _alone(options: DoctorOptions) -> int:
    """Not under MPI: start ranks with the mpirun that serve would use."""
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as directory:
        result = Path(directory) / "result"
        try:
            mpi = mpirun.find(os.environ)
        except errors.FatalError as stop:
            return _report(options, None, [Check("mpi", FAIL, str(stop), "one rank works without")], "")
        problem = _start(options, mpi, result)
        seen = probe_report.read(result)
        if problem is None and seen is not None and seen.error:
            problem = links.failed(seen.error, f"started with {mpi.mpirun}")
        return _report(options, seen, [] if problem is None else [problem], str(mpi))


def _start(options: DoctorOptions, mpi: Mpi, result: Path) -> Check | None:
    """Run the ranks to their end; what went wrong."""
    gpus = mpi_env.gpus() if options.device != "cpu" else 0
    ranks = options.ranks or len(options.devices) or (min(gpus, 2) if gpus else 2)
    request = ranks_member.ProbeRequest(str(result), options.device, options.devices, options.timeout)
    environ = dict(os.environ) | mpirun.environment(mpi, ranks, os.environ)
    environ[ranks_member.REQUEST_ENV] = msgspec.json.encode(request).decode()
    child = subprocess.Popen(
        mpirun.command(mpi, ranks, child_python.command(*RANK_PROBE)),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=linux.tie_to_parent(),
    )
    limit = options.timeout + MARGIN
    try:
        _, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return links.failed(f"{ranks} ranks did not end within {limit:g} s", f"try `{mpi.mpirun} -np {ranks} hostname`")
    finally:
        linux.kill_group(child.pid, signal.SIGKILL)
        child.wait()
    if result.exists():
        return None
    lines = [line.strip() for line in errors.splitlines() if line.strip(" -")]
    why = f": {lines[0]}" if lines else ""
    return links.failed(f"mpirun ended with code {child.returncode}{why}", f"try `{mpi.mpirun} -np {ranks} hostname`")


def _as_rank(options: DoctorOptions, where: RankPlacement) -> int:
    """One of a user's own ranks: measure, and on rank 0 report."""
    linux.die_with(os.getppid())
    request = ranks_member.ProbeRequest("", options.device, options.devices, options.timeout, own=True)
    if where.rank:
        ranks_member.exec_probe(request, where)
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as directory:
        result = Path(directory) / "result"
        ranks_member.run(msgspec.structs.replace(request, result=str(result)), where)
        seen = probe_report.read(result)
    problems = []
    if seen is None or seen.error:
        text = "rank 0 left no word" if seen is None else seen.error
        problems = [links.failed(text, "are all hosts up and reachable, with the same Phalanx and MPI?")]
        # mpirun has noticed that a rank failed, and is about to end this one.
        options = msgspec.structs.replace(options, speeds=False)
    return _report(options, seen, problems, f"started by {where.launcher}")


def _report(options: DoctorOptions, seen: ProbeReport | None, problems: list[Check], mpi: str) -> int:
    checks = [software.python(), software.packages()]
    if mpi:
        checks.append(links.mpi(mpi, seen))
    checks += problems
    known = seen.facts if seen is not None and not seen.error else []
    if seen is not None and known:
        checks += [
            links.ranks(seen),
            *software.alike(known),
            *host_checks.hosts(known),
            *host_checks.devices(known, seen),
        ]
    else:
        # No ranks: what this process sees must do.
        alone = RankPlacement(0, 1, 0, 1, "phalanx")
        here = facts.collect(alone, -1, binding.choose(alone, -1, os.environ))
        known = [msgspec.convert(msgspec.structs.asdict(here), probe_report.RankFacts)]
        checks += [*host_checks.hosts(known), *host_checks.devices(known, ProbeReport(""))]
    checks += [*host_checks.numa(known), *host_checks.binding(known)]
    if seen is not None and not seen.error:
        checks += [*links.all_reduce(seen, known), *links.networks(known), *links.clocks(seen)]
    checks += [*host_checks.memory(known), host_checks.port(options.host, options.port)]
    if options.speeds:
        checks.append(speeds.file_system(options.model or str(DEMO)))
        checks += [speeds.compiler(), speeds.processors(seen, os.environ)]
    _print(options, checks, seen)
    return errors.OK if worst(checks) != FAIL else errors.ERROR


def _print(options: DoctorOptions, checks: list[Check], seen: ProbeReport | None) -> None:
    counts = {state: sum(one.state == state for one in checks) for state in (OK, "WARN", FAIL)}
    if options.json:
        lines = [msgspec.structs.asdict(one) for one in checks]
        raw = None if seen is None else json.loads(msgspec.json.encode(seen))
        print(json.dumps({"state": worst(checks), "checks": lines, "ranks": raw}, indent=1))
        return
    print("\n".join(one.line() for one in checks))
    print(f"\n{counts[OK]} OK, {counts['WARN']} WARN, {counts[FAIL]} FAIL")
