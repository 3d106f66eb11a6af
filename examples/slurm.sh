#!/bin/bash
# A long run as a chain of short jobs: sbatch slurm.sh job.toml
#SBATCH --job-name=outlast
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=02:00:00
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180
# The signal goes to the tasks of the srun step, three minutes before the time limit: they save at
# the next step boundary and end with exit code 3, "to be continued".
srun outlast train "$@"
code=$?
if [ "$code" = 3 ]; then
  sbatch --dependency="afterany:$SLURM_JOB_ID" "$0" "$@"
fi
exit "$code"
