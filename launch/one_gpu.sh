#!/usr/bin/env bash
# One GPU: the toy by default, or any Qwen3-MoE folder that fits, with the memory savers on.
# Hardware: one GPU with 24 GB for the toy, driver R580 or newer, a C compiler, Python 3.11 with its headers; on an H200 (141 GB) models of up to 6.2B parameters fit by launch/plan.py
# (16 bytes a parameter for masters, moments, gradients): nine layers of Qwen3-30B-A3B, just, not its 48.
# Memory: 35% of the GPU for vLLM, which takes its share whatever the model; the toy itself needs little. Time: 0.1 hours for the toy.
# Expected: as launch/quickstart.sh on CPUs: the toy's reward goes from 0.5 to 0.85 in 40 steps, KL near 0. Not yet run.
# Usage: bash launch/one_gpu.sh; or MODEL=folder DATA=train.jsonl NEW=2048 PROMPT=512 bash launch/one_gpu.sh [flags]
# launch/plan.py looks at the GPU (or takes GPU=A100-80GB and so on) and stops this script where it does not fit.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
needs_cuda
model=${MODEL:-runs/cold-start}
[ -n "${MODEL:-}" ] || .venv/bin/python launch/cold_start.py --out "$model"
flags=(
  --model "$model" --data "${DATA:-addition}" --out "${OUT:-runs/one-gpu}" --resume auto
  --steps 100 --prompts-per-step 32 --group-size 8 --max-new-tokens "${NEW:-48}" --lr "${LR:-1e-4}" --save-every 50
  --rollout-memory 0.35 --precision bf16 --micro-batch-tokens 8192 --activation-checkpointing "$@"
)
.venv/bin/python launch/plan.py --gpu "${GPU:-here}" --gpus 1 --prompt-tokens "${PROMPT:-64}" "${flags[@]}"
exec .venv/bin/python train.py "${flags[@]}"
