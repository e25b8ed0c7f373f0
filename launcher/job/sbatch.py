"""`--sbatch`: prints a Slurm script that runs the command, instead of running it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import USAGE, FatalError
from ...rank.options import Options, Spec, specs
from ..options.option_sources import ParsedOptions
from ..options.resolve import ranks_of

FLAG = "--sbatch"
NODES = "--nodes", "--nnodes", "--num-nodes"  # read beside --sbatch alone

_HEAD = """\
#!/bin/bash
# {what}:  sbatch SCRIPT
# As `phalanx {verb} … {flag}` prints it.
# Sites ask for more: take one # away from what yours needs. Without cpus-per-task a rank may get a single core.
##SBATCH --account=NAME
##SBATCH --partition=NAME
##SBATCH --cpus-per-task=8
#SBATCH --job-name=phalanx
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
{gpus}#SBATCH --time=04:00:00
#SBATCH --output=phalanx-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
"""

_RUN = """\
# Let the job find MPI and `phalanx`, as your site needs it:
# module load openmpi
# source /path/to/.venv/bin/activate
# Since Slurm 22.05 srun takes cpus-per-task from this variable alone.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

trap 'asked=1; kill -USR1 $job' USR1
# With Open MPI; MPICH wants pmi2. `srun --mpi=list` shows what this Slurm has.
srun --mpi=pmix {command} &
job=$!
wait $job
code=$?
# `wait` also returns when the signal comes; then it waits for the end.
while [ -n "$asked" ]; do asked=; wait $job; code=$?; done
"""

_SERVE = f"""\
# On the login node `phalanx chat` finds this server, also through its job's number: phalanx chat --job NUMBER.
# Two minutes before the time is over this script, B, gets SIGUSR1.
#SBATCH --signal=B:USR1@120
{{key}}
# SIGUSR1 drains: open requests are finished, new ones refused. srun passes it on to the ranks.
{_RUN}
# A rank failed: the job is queued again, three times at most. Other codes end it: docs/exit-codes.md.
case $code in
    70 | 71 | 137) if [ "${{{{SLURM_RESTART_COUNT:-0}}}}" -lt 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit $code
"""

_BATCH = f"""\
# Five minutes before the time is over (Slurm may be a minute early) this script, B, gets SIGUSR1.
#SBATCH --signal=B:USR1@300

# SIGUSR1 stops the intake: what is under way is finished and written down. srun passes it on to the ranks.
{_RUN}
# The journal next to the output remembers what is done: the same script goes on there. Codes: docs/exit-codes.md.
case $code in
    75) scontrol requeue "$SLURM_JOB_ID" ;;                 # unfinished: the time was over
    70 | 71 | 137)                                          # a rank failed: not again and again
        if [ "${{{{SLURM_RESTART_COUNT:-0}}}}" -lt 20 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit $code
"""


def wanted(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """The command line without --sbatch and --nodes N, and the nodes; 0: as many as the ranks need, None: no script."""
    if FLAG not in argv:
        return list(argv), None
    rest, nodes, words = [], 0, [word for word in argv if word != FLAG]
    while words:
        name, equals, value = words[0].partition("=")
        if name not in NODES:
            rest.append(words.pop(0))
            continue
        del words[0]
        value = value if equals else words.pop(0) if words else ""
        if not value.isdecimal() or not int(value):
            raise FatalError(f"{name} {value!r}: a whole number from 1 on is needed", USAGE)
        nodes = int(value)
    return rest, nodes


def script(verb: str, chosen: ParsedOptions[Any], nodes: int = 0) -> str:
    """The script for the options from the command line, the environment and a file."""
    options: Options = chosen.options
    ranks, per_node = _ranks(options, nodes)
    if ranks > per_node and not any((options.tp, options.pp, options.dp)):
        # Without degrees all ranks would be one tensor group, whose every layer waits for the network.
        degrees = {"tp": per_node, "pp": ranks // per_node}
        origins = chosen.origins | dict.fromkeys(degrees, FLAG)
        chosen = msgspec.structs.replace(chosen, options=msgspec.structs.replace(options, **degrees), origins=origins)
    used = options.devices[:per_node]
    if options.device != "cpu" and any(one >= per_node for one in used):
        listed, fitting = (",".join(str(one) for one in some) for some in (options.devices, range(per_node)))
        raise FatalError(
            f"{FLAG}: --d {listed} names GPUs that the job would not have: it asks Slurm for one GPU a rank, "
            f"{per_node} on each node, which are counted from 0; write --d {fitting}",
            USAGE,
        )
    key = ""
    if options.api_key:
        key = "# The key is not written here: export PHALANX_API_KEY before sbatch, or give --api-key-file.\n"
    head = _HEAD.format(
        what="Run the requests of a file, in as many jobs as it takes" if verb == "batch" else "Serve a model",
        verb=verb,
        flag=FLAG,
        nodes=ranks // per_node,
        tasks=per_node,
        gpus="" if options.device == "cpu" else f"#SBATCH --gpus-per-node={per_node}\n",
    )
    line = command(verb, chosen)
    return head + (_BATCH.format(command=line) if verb == "batch" else _SERVE.format(command=line, key=key))


def _ranks(options: Options, nodes: int) -> tuple[int, int]:
    """Ranks of the job and of a node."""
    ranks = ranks_of(options)
    if not nodes:
        per_node = min(len(options.devices) or ranks, ranks)  # without --d one node gets all ranks
        if ranks % per_node:
            raise FatalError(f"{FLAG}: {ranks} ranks do not divide into nodes of {per_node} (--d)", USAGE)
        return ranks, per_node
    given = options.ranks or any((options.tp, options.pp, options.dp))
    if not given:
        ranks *= nodes
    elif ranks % nodes or (options.devices and ranks != nodes * len(options.devices)):
        each = len(options.devices) or max(1, options.tp)
        raise FatalError(
            f"{FLAG}: {ranks} ranks (--tp, --pp, --dp, --np) are not those of {nodes} nodes of {each}; for one model "
            f"over all of them write --nodes {nodes} --tp {each} --pp {nodes}, for a replica on each --nodes {nodes} "
            f"--tp {each} --dp {nodes}, with --d for a node's {each} GPUs",
            USAGE,
        )
    return ranks, ranks // nodes


def command(verb: str, chosen: ParsedOptions[Any]) -> str:
    """The command line with the same options."""
    table: dict[str, Spec] = specs(chosen.options.__class__)
    words = ["phalanx", verb]
    for name, spec in table.items():
        if chosen.origins[name] == "default" or spec.flag.slurm_decides or spec.flag.secret:
            continue
        value = getattr(chosen.options, name)
        shortest = next((one for one in spec.flag.flags if one.startswith("--")), spec.flag.flags[0])
        if spec.type is bool:
            words += [shortest if value else spec.flag.off[0]] if value is not None else []
        elif spec.type is tuple:
            words += [shortest, ",".join(str(one) for one in value)]
        elif value is not None:
            words += [shortest, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
