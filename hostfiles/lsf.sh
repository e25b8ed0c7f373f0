#!/bin/bash
# Serve a model from two nodes with eight GPUs each:  MODEL=/path/to/model bsub < hostfiles/lsf.sh
#
# The server runs on the first node of the job; on the login node `phalanx chat` finds it and says how to reach it.
#BSUB -J phalanx
#BSUB -n 16
#BSUB -R "span[ptile=8]"
#BSUB -gpu "num=8:mode=shared:j_exclusive=yes"
#BSUB -x
#BSUB -W 4:00
#BSUB -o phalanx-%J.log
# Two minutes before the time is over, LSF sends SIGUSR1 to this script.
#BSUB -wt 2
#BSUB -wa USR1

# LSF tells its hosts in $LSB_DJOB_HOSTFILE, $LSB_MCPU_HOSTS or $LSB_HOSTS. One rank per GPU:
hosts=phalanx-hosts-$LSB_JOBID
phalanx hostfile --slots 8 --mpi openmpi -o "$hosts" || exit

# SIGUSR1 drains: open requests are finished, new ones refused. mpirun passes it on to the ranks.
trap 'asked=1; kill -USR1 $job' USR1
# Open MPI starts the other node's ranks through LSF where it was built for it, through ssh elsewhere. With MPICH:
#   mpirun -np 16 -f "$hosts" phalanx serve …
mpirun -np 16 -hostfile "$hosts" --bind-to none --map-by slot \
    phalanx serve --model "$MODEL" --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --port 2000 &
job=$!
wait $job
code=$?
# `wait` also returns when the signal comes; then it waits for the end.
while [ -n "$asked" ]; do asked=; wait $job; code=$?; done
rm -f "$hosts"
exit $code  # docs/exit-codes.md
