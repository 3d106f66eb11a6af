#!/bin/bash
# Any script that ends with Outlast's exit codes, as a chain of plain Slurm jobs:
#   sbatch sbatch.sh train.py --lr 3e-4
# Add what your site needs: --nodes, --gpus-per-node, --partition, --account.
#SBATCH --job-name=train
#SBATCH --time=02:00:00
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@180
# The signal goes to the tasks of the srun step, three minutes before the time limit: they save at
# the next step boundary and end with 3. srun ends with the highest code of its tasks.
srun "${PYTHON:-python}" "$@"
code=$?
next() { sbatch --dependency="afterany:$SLURM_JOB_ID" --export="ALL,CRASHES=$1" "$0" "${@:2}"; }
case "$code" in
  0) ;;                                                  # done
  3) next 0 "$@" ;;                                      # to be continued
  2 | 4 | 5 | 6) echo "not started again: code $code" ;; # a person has to look at it
  *) [ "${CRASHES:-0}" -lt 3 ] && next $((${CRASHES:-0} + 1)) "$@" ;; # a crash, a lost node
esac
exit "$code"
