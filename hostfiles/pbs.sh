#!/bin/bash
# Serve a model from two nodes with eight GPUs each:  qsub -v MODEL=/path/to/model hostfiles/pbs.sh
#
# The server runs on the first node of the job; on the login node `phalanx chat` finds it and says how to reach it.
#PBS -N phalanx
#PBS -l select=2:ncpus=64:mpiprocs=8:ngpus=8
#PBS -l place=excl
#PBS -l walltime=04:00:00
#PBS -j oe
cd "$PBS_O_WORKDIR" || exit 2

# PBS names each host in $PBS_NODEFILE once per mpiprocs. --slots wins over that: one rank per GPU.
hosts=phalanx-hosts-$PBS_JOBID
phalanx hostfile --slots 8 --mpi openmpi -o "$hosts" || exit

# Open MPI starts the other node's ranks through PBS where it was built for it, through ssh elsewhere. They do not get
# this script's environment: --model and the other options travel from rank 0, a PATH does not. With MPICH:
#   mpirun -np 16 -f "$hosts" phalanx serve …
mpirun -np 16 -hostfile "$hosts" --bind-to none --map-by slot \
    phalanx serve --model "$MODEL" --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --port 2000 &
job=$!

# PBS ends a job whose time is over with SIGTERM, which leaves no time to finish anything. So two minutes before the end
# of the walltime above, the script drains by itself: open requests are finished, new ones refused. mpirun passes
# SIGUSR1 on to the ranks.
sleep $((4 * 3600 - 120)) &
clock=$!
wait -n  # for the one that ends first
if kill -0 $job 2>/dev/null; then
    kill -USR1 $job
else
    kill $clock
fi
wait $job
code=$?
rm -f "$hosts"
exit $code  # docs/exit-codes.md
