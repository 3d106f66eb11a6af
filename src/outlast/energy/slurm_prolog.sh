#!/bin/bash
# Slurm Prolog: lock the GPU clocks that a job asks for in its comment.
# Slurm sets no search path for prologs.
PATH=/usr/bin:/bin
marks=/run/outlast-clocks
[[ "$SLURM_JOB_ID" =~ ^[0-9]+$ ]] || exit 0
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
ask() { nvidia-smi --id="$1" "$2" --format=csv,noheader || echo unknown; }
umask 077
# A job that runs at full clocks is better than a drained node.
mkdir -p "$marks" || exit 0
for index in "${!gpus[@]}"; do
    gpu="${gpus[$index]}"
    clock="${clocks[$index]}"
    mig="$(ask "$gpu" --query-gpu=mig.mode.current)"
    if [[ "$mig" != Disabled && "$mig" != "[N/A]" ]]; then
        echo "outlast: GPU $gpu has MIG $mig; its clock is not set"
        continue
    fi
    # The job has no process yet: these are of others.
    others="$(ask "$gpu" --query-compute-apps=pid)"
    if [[ -n "$others" ]]; then
        echo "outlast: GPU $gpu is used by process ${others//[[:space:]]/, }; its clock is not set"
        continue
    fi
    : > "$marks/$SLURM_JOB_ID.$gpu" || continue
    nvidia-smi --id="$gpu" --lock-gpu-clocks="$clock,$clock" || rm -f "$marks/$SLURM_JOB_ID.$gpu"
done
exit 0
