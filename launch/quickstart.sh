#!/usr/bin/env bash
# The main job on a fresh machine: environment, cold start, on-policy MiniRL, curves.
# Hardware: 2 CPU cores, 8 GB (or one GPU). Leaves runs/quickstart/; a second start goes on or re-uses what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
.venv/bin/python launch/cold_start.py --out runs/cold-start
.venv/bin/python train.py --model runs/cold-start --data addition --out runs/quickstart --resume auto \
  --steps 100 --prompts-per-step 32 --group-size 8 --max-new-tokens 48 --lr 1e-4 --save-every 50
.venv/bin/python launch/plot.py runs/quickstart --out runs/quickstart/curves.png
