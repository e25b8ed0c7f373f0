"""Directives of job scripts, read by the options that the manuals of sbatch, qsub (OpenPBS), bsub and flux batch list.

An option that a manual does not have, a value that it does not allow, or a directive behind the first command, which no
batch system reads, is a ValueError.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

NUMBER, TIME, ANY, NONE = r"\d+", r"(\d+-)?\d+(:\d\d){0,2}", r".+", ""
SIGNAL = r"(SIG)?[A-Z]+\d?|\d+"
SBATCH = {
    "--job-name": ANY, "-J": ANY, "--nodes": r"\d+(-\d+)?", "-N": r"\d+(-\d+)?", "--ntasks": NUMBER, "-n": NUMBER,
    "--ntasks-per-node": NUMBER, "--gpus-per-node": r"(\w+:)?\d+", "--gpus-per-task": r"(\w+:)?\d+",
    "--gpus": r"(\w+:)?\d+", "--gres": ANY, "--cpus-per-task": NUMBER, "--mem": r"\d+[KMGT]?", "--exclusive": NONE,
    "--time": TIME, "-t": TIME, "--output": ANY, "--error": ANY, "--open-mode": "append|truncate", "--requeue": NONE,
    "--no-requeue": NONE, "--signal": rf"([BR]+:)?({SIGNAL})(@\d+)?", "--array": r"[\d,-]+(:\d+)?(%\d+)?",
    "--partition": ANY, "--account": ANY, "--qos": ANY, "--constraint": ANY, "--export": ANY, "--dependency": ANY,
    "--reservation": ANY, "--hint": "compute_bound|memory_bound|(no)?multithread", "--uenv": ANY, "--view": ANY,
}  # fmt: skip
CHUNK = r"(ncpus|mpiprocs|ngpus|ompthreads)=\d+|mem=\d+[kmgt]?b|(host|vnode|arch|model)=\w+"
PLACE = r"(free|pack|scatter|vscatter)?:?(excl|shared|exclhost)?(:group=\w+)?"
QSUB = {
    "-N": r"[\w.+-]{1,236}", "-l": ANY, "-j": "oe|eo|n", "-o": ANY, "-e": ANY, "-q": ANY, "-A": ANY, "-P": ANY,
    "-r": "y|n", "-V": NONE, "-v": ANY, "-S": ANY, "-J": r"\d+-\d+(:\d+)?", "-W": ANY, "-k": ANY, "-m": r"[abejn]+",
}  # fmt: skip
BSUB = {
    "-J": ANY, "-n": r"\d+(,\d+)?", "-R": r"\w+\[.+\]( \w+\[.+\])*", "-gpu": r"-|\w+=[\w=./:]+(:\w+=[\w./]+)*",
    "-x": NONE, "-W": r"(\d+:)?\d+(/\S+)?", "-o": ANY, "-e": ANY, "-wt": r"(\d+:)?\d+", "-wa": SIGNAL, "-q": ANY,
    "-P": ANY, "-G": ANY, "-M": ANY, "-env": ANY, "-r": NONE, "-nnodes": NUMBER, "-alloc_flags": ANY, "-B": NONE,
}  # fmt: skip
DURATION = r"\d+(\.\d+)?[smhd]?"
FLUX = {
    "--job-name": ANY, "--nodes": NUMBER, "-N": NUMBER, "--nslots": NUMBER, "-n": NUMBER, "--cores-per-slot": NUMBER,
    "-c": NUMBER, "--gpus-per-slot": NUMBER, "-g": NUMBER, "--exclusive": NONE, "-x": NONE, "--queue": ANY, "-q": ANY,
    "--time-limit": DURATION, "-t": DURATION, "--output": ANY, "--error": ANY, "--setattr": ANY, "--setopt": ANY,
    "-o": ANY, "--env": ANY, "--requires": ANY, "--signal": rf"({SIGNAL})?(@{DURATION})?", "--begin-time": ANY,
}  # fmt: skip
SYSTEMS = {"#SBATCH": SBATCH, "#PBS": QSUB, "#BSUB": BSUB, "# flux:": FLUX}


def read(text: str) -> tuple[str, dict[str, str]]:
    """The batch system's sentinel, and the options' values by their names."""
    (sentinel,) = [one for one in SYSTEMS if re.search(rf"^{re.escape(one)}\s", text, re.MULTILINE)]
    options: dict[str, str] = {}
    for name, value in _options(sentinel, _directives(sentinel, text)):
        known = SYSTEMS[sentinel]
        if name not in known:
            raise ValueError(f"{sentinel} {name}: no such option")
        if (not value) != (not known[name]) or not re.fullmatch(known[name], value):
            raise ValueError(f"{sentinel} {name} {value!r}: expected {known[name] or 'no value'}")
        if name in options and name != "-l":
            raise ValueError(f"{sentinel} {name}: given twice")
        options[name] = f"{options[name]},{value}" if name in options else value
    if "-l" in options:
        _check_resources(options["-l"])
    return sentinel, options


def _directives(sentinel: str, text: str) -> list[str]:
    """Lines that begin with the sentinel, without it."""
    found, over = [], False
    for line in text.splitlines():
        if line.startswith(sentinel):
            if over:
                raise ValueError(f"{line}: it stands behind a command, so nobody reads it")
            found.append(line.removeprefix(sentinel))
        elif line.strip() and not line.startswith("#"):
            over = True
        elif sentinel == "# flux:" and found and not line.strip():
            over = True  # flux wants them in one group
    return found


def _options(sentinel: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    known = SYSTEMS[sentinel]
    for line in lines:
        words = shlex.split(line, comments=sentinel == "# flux:")
        while words:
            name, equals, value = words.pop(0).partition("=")
            if not equals and known.get(name) and words:
                value = words.pop(0)
            yield name, value


def _check_resources(text: str) -> None:
    """PBS: chunks, their place, and the limits of the job."""
    for part in re.split(r",(?=select|place|walltime)", text):
        name, _, value = part.partition("=")
        if name == "select":
            for chunk in value.split("+"):
                count, *resources = chunk.split(":")
                if not count.isdigit() or not all(re.fullmatch(CHUNK, one) for one in resources):
                    raise ValueError(f"#PBS -l {part}: no such resource of a chunk")
        elif name == "place":
            if not re.fullmatch(PLACE, value):
                raise ValueError(f"#PBS -l {part}: no such place")
        elif name != "walltime" or not re.fullmatch(r"\d+:\d\d:\d\d", value):
            raise ValueError(f"#PBS -l {part}: unknown")
