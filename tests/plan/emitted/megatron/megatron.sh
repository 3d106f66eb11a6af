#!/bin/bash
# demo: mixture on 32 devices (data 8, tensor 2, pipeline 2, expert 4), batch 64 of 512 tokens.
# Made by outlast plan emit.
# Predicted: step 1.20 s (0.93 to 1.51, 90 %)
# Predicted: memory 41 GB of 80 GB
# Assumed, and not set here: the loss keeps 4 bytes per logit.
# On several nodes, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which node this is and
# where the first one is.
set -euo pipefail
cd "$(dirname "$0")"
export CUDA_DEVICE_MAX_CONNECTIONS=1
arguments=(
  --num-layers 4
  --hidden-size 256
  --ffn-hidden-size 512
  --num-attention-heads 8
  --kv-channels 32
  --seq-length 512
  --max-position-embeddings 512
  --position-embedding-type rope
  --normalization RMSNorm
  --disable-bias-linear
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --attention-backend auto
  --group-query-attention
  --num-query-groups 4
  --swiglu
  --untie-embeddings-and-output-weights
  --num-experts 8
  --moe-router-topk 2
  --moe-ffn-hidden-size 128
  --moe-token-dispatcher-type alltoall
  --expert-model-parallel-size 4
  --moe-layer-freq '([0]*1+[1]*3)'
  --moe-grouped-gemm
  --micro-batch-size 1
  --global-batch-size 64
  --train-iters 1000
  --lr 0.0003
  --min-lr 3e-05
  --lr-decay-style cosine
  --lr-warmup-iters 0
  --clip-grad 1.0
  --seed 0
  --save demo
  --load demo
  --save-interval 500
  --exit-signal-handler
  --log-interval 10
  --eval-iters 0
  --bf16
  --fp8-format hybrid
  --accumulate-allreduce-grads-in-fp32
  --tensor-model-parallel-size 2
  --context-parallel-size 1
  --pipeline-model-parallel-size 2
  --sequence-parallel
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --vocab-size 2048
  --tokenizer-type NullTokenizer
  --mock-data
)
exec torchrun --nnodes="${NNODES:-4}" --nproc-per-node=8 \
  --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" \
  --master-port="${MASTER_PORT:-29500}" \
  "${MEGATRON:?is the folder of Megatron-LM}/pretrain_gpt.py" "${arguments[@]}"
