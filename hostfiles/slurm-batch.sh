#!/bin/bash
# Run the requests of a file, in as many jobs as it takes:  sbatch SCRIPT
# As `phalanx batch … --sbatch` prints it.
# Sites ask for more: take one # away from what yours needs. Without cpus-per-task a rank may get a single core.
##SBATCH --account=NAME
##SBATCH --partition=NAME
##SBATCH --cpus-per-task=8
#SBATCH --job-name=phalanx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=phalanx-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the time is over (Slurm may be a minute early) this script, B, gets SIGUSR1.
#SBATCH --signal=B:USR1@300

# SIGUSR1 stops the intake: what is under way is finished and written down. srun passes it on to the ranks.
# Let the job find MPI and `phalanx`, as your site needs it:
# module load openmpi
# source /path/to/.venv/bin/activate
# Since Slurm 22.05 srun takes cpus-per-task from this variable alone.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

trap 'asked=1; kill -USR1 $job' USR1
# With Open MPI; MPICH wants pmi2. `srun --mpi=list` shows what this Slurm has.
srun --mpi=pmix phalanx batch --model /path/to/model --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --input requests.jsonl --output answers.jsonl &
job=$!
wait $job
code=$?
# `wait` also returns when the signal comes; then it waits for the end.
while [ -n "$asked" ]; do asked=; wait $job; code=$?; done

# The journal next to the output remembers what is done: the same script goes on there. Codes: docs/exit-codes.md.
case $code in
    75) scontrol requeue "$SLURM_JOB_ID" ;;                 # unfinished: the time was over
    70 | 71 | 137)                                          # a rank failed: not again and again
        if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit $code
