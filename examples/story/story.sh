#!/bin/bash
# From a Hugging Face config.json to text: plan, tensorize, survive, train on a queue, export, write.
#
#   bash story.sh [SECTION.KEY=VALUE ...]
#
# On a machine with Slurm the training is a chain of jobs; on any other it runs here, on 2 processes.
set -euo pipefail
cd "$(dirname "$0")"

echo '== What will it take? On 8 H100, or what CLUSTER names ("here" needs outlast plan calibrate --run) =='
outlast plan explain job.toml --cluster "${CLUSTER:-h100x8}"

echo "== What would a dead process cost? Two are killed, and the weights compared. =="
outlast drill job.toml "$@" --at reduce --at optimizer run.name=story-drill train.steps=60 train.stop_after_steps=0

echo "== Train =="
if command -v sbatch >/dev/null && sinfo >/dev/null 2>&1; then
  outlast submit job.toml "$@"
  while [[ "$(outlast cluster status runs/story)" =~ run\ story:\ (running|waiting) ]]; do
    sleep 2
  done
  outlast cluster status runs/story
else
  outlast train job.toml --nproc 2 "$@"
fi

echo "== The model, for any program that reads Hugging Face's format =="
outlast export runs/story --output model
outlast report runs/story
python generate.py model "def "
