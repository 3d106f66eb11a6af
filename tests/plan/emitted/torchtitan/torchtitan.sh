#!/bin/bash
# demo: dense on 32 devices (data 4, tensor 2, pipeline 4), batch 64 of 512 tokens.
# Made by outlast plan emit.
# Predicted: step 1.20 s (0.93 to 1.51, 90 %)
# Predicted: memory 41 GB of 80 GB
# Assumed, and not set here: the loss keeps 4 bytes per logit.
# On several nodes, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which node this is and
# where the first one is.
# For torchtitan 0.3. It has no handler of signals: a run that is stopped continues from its
# newest checkpoint, at most 500 steps back.
set -euo pipefail
cd "$(dirname "$0")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec torchrun --nnodes="${NNODES:-4}" --nproc-per-node=8 \
  --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" \
  --master-port="${MASTER_PORT:-29500}" \
  -m torchtitan.train --module torchtitan_run --config run
