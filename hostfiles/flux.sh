#!/bin/bash
# Serve a model from two nodes with eight GPUs each:  MODEL=/path/to/model flux batch hostfiles/flux.sh
#
# Each job submits the next one before its time is over, and hands over to it: clients use `phalanx gateway`.
# flux: --job-name=phalanx
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=4h
# flux: --output=phalanx-{{id}}.log

# The script is a copy, so its own place has to be told to the next job.
script=${PHALANX_SCRIPT:-$PWD/hostfiles/flux.sh}
export PHALANX_SCRIPT=$script

# --parent: this script runs in a Flux of its own, and the next job is one of the Flux around it. What is printed is a
# number, by which the job is looked after.
next="flux --parent job id --to=dec \$(flux --parent batch '$script')"

# Each rank finds its GPU by --d and binds itself, so Flux does neither. Open MPI joins by PMIx (the package flux-pmix);
# MPICH needs no -o pmi. `flux job timeleft` tells the seconds until the time limit.
flux run --nodes=2 --tasks-per-node=8 --gpus-per-node=8 -o pmi=pmix -o cpu-affinity=off -o gpu-affinity=off \
    phalanx serve --model "$MODEL" --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --host 0.0.0.0 --port 0 \
    --resubmit --resubmit-command "$next" --time-left "$(flux job timeleft)"
