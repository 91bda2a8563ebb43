#!/usr/bin/env bash
# Qwen3-30B-A3B with the paper's settings on one node: on-policy MiniRL, 64 x 16 responses an update, fp8 rollout.
# Hardware: 8 x H200 (141 GB), NVLink, driver R580 or newer; a C compiler, Python 3.11 with its headers; 250 GB of host memory; 0.5 TB of disk a checkpoint, of which two stay.
# Memory: 131 GB a GPU in training, 135 while it samples, by launch/plan.py, which runs first and stops what cannot fit.
# Time: 0.5 hours a step at 12,000 tokens a response, 1.7 at 32,768, by the same plan (4 to 14 GPU hours; the paper
# reports 5 to 6); so 20 to 70 days for 1,000 steps.
# Stop: SIGTERM or Ctrl-C ends it when the step is done and saved, within 2 hours; then, or after a SIGKILL, the same
# command goes on from the newest checkpoint.
# Expected: Fig. 1 of the paper, MiniRL's curve: accuracy rises for 1,000 steps, the KL stays flat. Not yet run.
# Usage: MODEL=folder DATA=train.jsonl bash launch/qwen3_30b_8gpu.sh [more flags of train.py]
#   MODEL  a Qwen3-30B-A3B after a cold start. Its max_position_embeddings must leave room for the prompt beside 32,768
#          new tokens: 40,960 in the instruct model's config.json; the base model's 32,768 has to be raised.
#   DATA   JSON lines with "prompt" and "answer"; prompts of up to 1,024 tokens. A chat template that the model brings is
#          applied; for texts that hold one already add --prompt-template '{prompt}'.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
needs_cuda
flags=(
  --model "${MODEL:?folder of the checkpoint}" --data "${DATA:?JSON lines}" --out "${OUT:-runs/qwen3-30b}" --resume auto
  --steps 1000 --save-every 20
  --prompts-per-step 64 --group-size 16 --minibatches 1 --max-new-tokens 32768
  --rollout-dtype fp8 --rollout-tp 2 --rollout-memory 0.56
  --is-cap 5 --eps-low 0.2 --eps-high 0.27 --replay none --no-record-routes --lr 1e-6
  --precision bf16 --micro-batch-tokens 32768 --activation-checkpointing "$@"
)
.venv/bin/python launch/plan.py --gpu "${GPU:-here}" --gpus 8 --prompt-tokens 1024 "${flags[@]}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" TORCH_ELASTIC_SHUTDOWN_TIMEOUT=7200 # torchrun's own: 1 and 30 s
exec .venv/bin/torchrun --standalone --nproc-per-node 8 train.py "${flags[@]}"
