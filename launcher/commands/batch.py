"""`phalanx batch`: a file of requests becomes a file of answers, however often the job has to be started for it.

The batch process, which has the server process's place, decides when the job is over and with which code.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from ... import errors, logs
from ...errors import USAGE, FatalError
from ...logs import say
from ...rank.flags import BATCH
from ...rank.options import SERVER_ONLY, Options, flag
from ...rank.server.batch.config import VARIABLE, BatchConfig
from ...rank.server.config import ServerConfig
from ..job import mpi_env, rank_bootstrap, sbatch, secret_variables, server_process, supervisor, visible_devices
from ..job.job_end import end_time
from ..options import option_sources
from ..options.help import options_help, show_config
from ..options.resolve import in_force, joined, resolve

HELP = "run the requests of a file without a server; what was killed resumes"
USAGE_LINE = """phalanx batch [DIR] -i FILE -o FILE [options]: answer a file of requests in OpenAI's batch format
Start it again to go on where it was: after exit code 75, and after any kill.
"""
PROCESS = ["-m", "phalanx.rank.server.batch"]
RESERVE = 30.0  # seconds before the end, or a tenth of the time where that is less
DECIDED = (errors.OK, errors.ERROR, errors.USAGE, errors.MODEL, errors.UNFINISHED)
_flag = partial(flag, group="Batch", scope=(BATCH,))


class BatchOptions(Options, frozen=True, kw_only=True):
    """The choices of this verb, and those of serve that are about model and ranks."""

    input: Annotated[
        str,
        _flag("--input", "-i", metavar="FILE", help="requests: a file, a directory of .jsonl files, or -"),
    ] = ""  # fmt: skip
    output: Annotated[str, _flag("--output", "-o", metavar="FILE", help="answers; it appears when all are there")] = ""
    errors: Annotated[
        str, _flag("--errors", metavar="FILE", help="what failed, with line numbers; none: OUTPUT.errors…")
    ] = ""
    summary: Annotated[str, _flag("--summary", metavar="FILE", help="figures of the run, as JSON")] = ""
    ordered: Annotated[bool, _flag("--ordered", off=("--no-ordered",), help="answers in the order of the input")] = (
        False
    )
    overwrite: Annotated[
        bool,
        _flag("--overwrite", off=("--no-overwrite",), help="begin anew, without what was done before"),
    ] = False
    fail_on_error: Annotated[
        bool, _flag("--fail-on-error", off=("--no-fail-on-error",), help="end with 1 if a request failed")
    ] = False
    deadline: Annotated[
        str,
        _flag("--deadline", metavar="TIME", slurm_decides=True,
             help="be done by then: 90, 30m, 4h, or 2026-11-20T18:00; none: as Slurm tells"),
    ] = ""  # fmt: skip
    reserve: Annotated[
        float, _flag("--reserve", metavar="S", low=0, help="seconds free before it; 0: 30, or a tenth")
    ] = 0.0


def main(argv: Sequence[str]) -> int:
    mpi_env.refuse_lonely_srun(os.environ)
    place = mpi_env.rank_placement(os.environ)
    first = place is None or place.rank == 0
    shown = False  # all that is wanted is to be printed: no rank joins MPI
    try:
        argv, nodes = sbatch.wanted(argv)
        chosen = option_sources.read(BatchOptions, argv, os.environ, strict=first)
        if chosen.options.log_format == "json":
            logs.use_json("launcher")
        place = joined(chosen.options, place)
        shown = chosen.help or chosen.show_config or nodes is not None
        if shown:
            if first:
                _show(chosen, nodes, place)
            return 0
        if not first:
            assert place is not None
            secret_variables.forget()
            rank_bootstrap.join(_plain(chosen.options), place)
        for note in chosen.notes:
            say(note)
        _refuse(chosen)
        config = configure(chosen.options, place)
        options = resolve(_plain(chosen.options), place)
        secret_variables.forget()
        if _is_done(config):
            if place is not None and place.size > 1:
                rank_bootstrap.finish(options, place)
            return errors.OK
    except FatalError as stop:
        if not first:
            raise FatalError("", stop.code) from None  # rank 0 tells it
        if place is not None and not shown and not getattr(stop, "everywhere", False):
            rank_bootstrap.give_up(stop, place)
        raise
    gpus = measured(options, options.ranks if place is None else place.local_size)
    config = msgspec.structs.replace(config, gpus=gpus)
    if place is not None:
        rank_bootstrap.join(options, place, lambda settings: start(config, settings))
    return run(config, options)


def _show(
    chosen: option_sources.ParsedOptions[BatchOptions], nodes: int | None, place: mpi_env.RankPlacement | None
) -> None:
    """The output of --help, --sbatch and --show-config."""
    if chosen.help:
        print(USAGE_LINE + options_help(BatchOptions, SERVER_ONLY))
    elif nodes is not None:
        _refuse(chosen)
        print(sbatch.script("batch", chosen, nodes), end="")
    else:
        print(show_config(chosen, in_force(chosen.options, place)))


def _plain(options: BatchOptions) -> Options:
    """The options that the ranks get."""
    return Options(**{name: getattr(options, name) for name in Options.__struct_fields__})


def _refuse(chosen: option_sources.ParsedOptions[BatchOptions]) -> None:
    """Options that would mean nothing here. In the environment or a file they may be for other verbs."""
    for name in SERVER_ONLY:
        if chosen.origins[name].startswith("command line"):
            written = chosen.origins[name].partition("(")[2].rstrip(")")
            raise FatalError(f"{written} is for `phalanx serve`: a batch job listens nowhere", USAGE)


def configure(options: BatchOptions, place: mpi_env.RankPlacement | None) -> BatchConfig:
    """The batch process's configuration, as far as this verb knows it. Raises FatalError for what cannot work."""
    from ...rank.server.batch import batch_input  # here: the other ranks need none of it

    for name, metavar in (("input", "-i FILE"), ("output", "-o FILE")):
        if not getattr(options, name):
            raise FatalError(f"{metavar} is needed: phalanx batch -i requests.jsonl -o answers.jsonl", USAGE)
    if options.input == "-" and place is not None:
        # Measured: Open MPI 5 never closes rank 0's standard input, MPICH ends a job that reads slowly.
        raise FatalError(f"-i - under {place.launcher}: MPI hands no standard input on that can be relied on; "
                   "write the requests to a file", USAGE)  # fmt: skip
    source = options.input if options.input == "-" else os.path.abspath(os.path.expanduser(options.input))
    batch_input.check(source)
    output = _target("-o", options.output)
    root, extension = os.path.splitext(output)
    errors = _target("--errors", options.errors or f"{root}.errors{extension or '.jsonl'}")
    summary = _target("--summary", options.summary) if options.summary else ""
    written = [one for one in (output, errors, summary) if one]
    if source in written or len(set(written)) < len(written):
        raise FatalError("-i, -o, --errors and --summary have to be different files", USAGE)
    inside = [one for one in written if os.path.dirname(one) == source and one.endswith(".jsonl")]
    if inside:
        raise FatalError(f"{inside[0]} would be read as input at the next start: write it to another directory", USAGE)
    end, left = end_time(options.deadline, os.environ, time.time())
    terminal = place is None and os.isatty(2) and not logs.is_json()
    return BatchConfig(
        server=ServerConfig(model_dir="", link="", listen_fd=-1),
        input=source,
        output=output,
        errors=errors,
        summary=summary,
        ordered=options.ordered,
        overwrite=options.overwrite,
        fail_on_error=options.fail_on_error,
        end_time=end,
        reserve=options.reserve or min(RESERVE, left / 10),
        supervised=place is None,
        columns=shutil.get_terminal_size().columns if terminal else 0,
    )


def _target(name: str, path: str) -> str:
    """The absolute path of a file that will be written."""
    path = os.path.abspath(os.path.expanduser(path))
    directory = os.path.dirname(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise FatalError(f"{name} {path}: it is no regular file, which a file that appears at once has to be", USAGE)
    if not os.path.isdir(directory):
        raise FatalError(f"{name} {path}: there is no directory {directory}", USAGE)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise FatalError(f"{name} {path}: the directory {directory} cannot be written", USAGE)
    return path


def measured(options: Options, ranks: int) -> list[str]:
    """This host's GPUs that compute, as the variable names them; none where this process does not see all of them."""
    if options.device == "cpu" or not mpi_env.gpus():
        return []
    names = visible_devices.listed(os.environ)
    chosen = list(options.devices or range(ranks))[:ranks]
    if names is None:
        return [str(one) for one in chosen]
    return [names[one] for one in chosen] if max(chosen) < len(names) else []


def _is_done(config: BatchConfig) -> bool:
    """Nothing of an earlier run is overwritten unasked; of one that is complete there is nothing left to do."""
    if config.overwrite or os.path.exists(config.journal):
        return False
    there = [path for path in (config.output, config.errors) if os.path.exists(path)]
    if not there:
        return False
    from ...rank.server.batch import output

    if there[0] == config.output and output.is_complete(config.input, config.output, config.errors):
        say(f"{config.output} has every answer already: nothing to do")
        return True
    raise FatalError(f"{there[0]} is there already, and not of this input: remove it, or give --overwrite", USAGE)


def start(config: BatchConfig, settings: ServerConfig) -> subprocess.Popen[bytes]:
    """The batch process, with our standard input if it is to read that."""
    settings = msgspec.structs.replace(settings, queue_size=1 << 30)
    config = msgspec.structs.replace(config, server=settings)
    # Until the process can hear it; the supervisor repeats it, and the ranks hold it back.
    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        stdin = None if config.input == "-" else subprocess.DEVNULL
        return server_process.spawn(PROCESS, VARIABLE, config, os.environ, [], stdin)
    finally:
        signal.signal(signal.SIGUSR1, old)


def run(config: BatchConfig, options: Options) -> int:
    """Not under MPI: supervise."""
    directory = server_process.job_directory()
    try:
        link = os.path.join(directory, "link")
        plan = supervisor.launch_spec(options, link)
        child = start(config, server_process.config(options, link, None, []))
        return Supervisor(plan, child, options.restarts).run()
    finally:
        server_process.remove(directory)


class Supervisor(supervisor.Supervisor):
    """The batch process hears the first signal, and its exit code is the job's; the ranks' is, where they fail."""

    def run(self) -> int:
        code = super().run()
        assert self._server is not None
        said = self._server.returncode  # it may have come to its end when a second signal stopped the job
        return said if code == errors.STOPPED and said in DECIDED else code

    def _signals(self, numbers: bytes) -> None:
        for number in numbers:
            if not self._draining:
                self._draining = True
                self._send_drain()
            elif number != signal.SIGUSR1:
                self._stop(errors.STOPPED)

    def _send_drain(self) -> None:
        if self._server is not None and self._server.poll() is None and not self._stopping:
            self._server.send_signal(signal.SIGUSR1)
            self._after(supervisor.DRAIN_REPEAT, self._send_drain)

    def _server_ended(self) -> None:
        assert self._server is not None
        code = self._server.wait()
        if self._stopping:
            return
        if code not in DECIDED and code < 0:
            say(f"the batch process was killed by signal {-code}; the same command resumes", "error")
        if self._ranks is None:
            self._code = code if code in DECIDED else errors.RANK_FAILED
        elif code in DECIDED:
            self._stop(code)
        else:  # it ended because rank 0 did: mpirun has the word
            self._after(supervisor.PEER_PATIENCE, lambda: self._stop(errors.RANK_FAILED))

    def _ranks_ended(self) -> None:
        super()._ranks_ended()
        if self._code == errors.OK and not self._stopping:
            self._code = None  # the batch process tells it
            self._after(supervisor.PEER_PATIENCE, self._no_word)

    def _no_word(self) -> None:
        self._code = errors.RANK_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
