#!/bin/bash
# Slurm Prolog: lock the GPU clocks that a job asks for in its comment.
# Slurm sets no search path for prologs.
PATH=/usr/bin:/bin
asked="${SLURM_JOB_COMMENT#outlast-clocks=}"
if [[ "$asked" == "$SLURM_JOB_COMMENT" || ! "$asked" =~ ^[0-9]{3,4}(,[0-9]{3,4})*$ ]]; then
    exit 0
fi
IFS=, read -r -a clocks <<< "$asked"
IFS=, read -r -a gpus <<< "$SLURM_JOB_GPUS"
if (( ${#clocks[@]} != ${#gpus[@]} )); then
    echo "outlast: ${#clocks[@]} clocks for ${#gpus[@]} GPUs; none is set"
    exit 0
fi
for index in "${!gpus[@]}"; do
    clock="${clocks[$index]}"
    # A job that runs at full clocks is better than a drained node.
    nvidia-smi --id="${gpus[$index]}" --lock-gpu-clocks="$clock,$clock" || true
done
exit 0
