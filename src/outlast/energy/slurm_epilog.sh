#!/bin/bash
# Slurm Epilog: give back the GPU clocks that the prolog locked.
# Slurm sets no search path for prologs.
PATH=/usr/bin:/bin
marks=/run/outlast-clocks
[[ "$SLURM_JOB_ID" =~ ^[0-9]+$ ]] || exit 0
for mark in "$marks/$SLURM_JOB_ID".*; do
    # Without a mark the pattern stands for itself.
    [[ -f "$mark" ]] || continue
    gpu="${mark##*/"$SLURM_JOB_ID".}"
    if nvidia-smi --id="$gpu" --reset-gpu-clocks; then
        rm -f "$mark"
    else
        echo "outlast: the clock of GPU $gpu may still be locked; $mark stays"
    fi
done
exit 0
