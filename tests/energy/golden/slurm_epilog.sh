#!/bin/bash
# Slurm Epilog: give back the GPU clocks that the prolog locked.
# Slurm sets no search path for prologs.
PATH=/usr/bin:/bin
case "$SLURM_JOB_COMMENT" in outlast-clocks=*) ;; *) exit 0 ;; esac
IFS=, read -r -a gpus <<< "$SLURM_JOB_GPUS"
for gpu in "${gpus[@]}"; do
    nvidia-smi --id="$gpu" --reset-gpu-clocks || true
done
exit 0
