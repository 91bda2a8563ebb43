#!/usr/bin/env bash
# Qwen3-30B-A3B with the paper's off-policy settings under Slurm: N updates of 64 x 16 responses each, fp8 rollout, replay.
# Hardware: 2 nodes of 8 x H200 (default), or 8 of 8 x H100-80GB (--nodes=8), driver R580 or newer; a C compiler, Python
# 3.11 with its headers; 400 Gb/s a GPU between nodes; 250 GB of host memory a node; 0.5 TB of disk a checkpoint on a
# file system that all nodes share.
# Memory: 100 GB a GPU in training, 125 while it samples, by launch/plan.py, which runs first and stops what cannot fit.
# Time: 0.6 hours a step of N = 2 at 12,000 tokens a response, 1.7 at 32,768, by the same plan.
# Expected: Fig. 2 of the paper for N = 2 with R2; with REPLAY=R3, N=4 is Fig. 3 and N=8 Fig. 4
# (N=8 keeps more routes: add --rollout-memory 0.6). Not yet run.
# Usage, from the repository: MODEL=folder DATA=train.jsonl sbatch launch/qwen3_30b_slurm.sh [more flags of train.py]
# MODEL and DATA as in qwen3_30b_8gpu.sh. .venv is made if it is not there; beforehand, on a node with a GPU:
# bash -c '. launch/setup.sh'. Nodes with several networks: export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME before sbatch.
# Stop: scancel --signal=TERM, or Slurm two hours before the time is up: the step is finished and saved, and the same
# command goes on from there. A step that takes longer than that is lost, to the newest checkpoint.
# Between nodes slower than 200 Gb/s a GPU add --hsdp-replicas 2 --rollout-memory 0.56: gathers stay in a node, states double.
#SBATCH --job-name=minirl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@7200
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run it with sbatch, from the repository}"
. launch/setup.sh
needs_cuda
N=${N:-2}
flags=(
  --model "${MODEL:?folder of the checkpoint}" --data "${DATA:?JSON lines}" --out "${OUT:-runs/qwen3-30b-n$N}" --resume auto
  --steps 1000 --save-every 10
  --prompts-per-step "$((64 * N))" --group-size 16 --minibatches "$N" --max-new-tokens 32768
  --rollout-dtype fp8 --rollout-tp 2 --rollout-memory 0.65
  --is-cap 5 --eps-low 0.2 --eps-high 0.27 --replay "${REPLAY:-R2}" --lr 1e-6
  --precision bf16 --micro-batch-tokens 32768 --activation-checkpointing "$@"
)
.venv/bin/python launch/plan.py --gpu "${GPU:-here}" --gpus "$((8 * SLURM_NNODES))" --prompt-tokens 1024 "${flags[@]}"
# torchrun's own are 1 thread and 30 s; Slurm's TERM comes two hours before the end, and a step is finished and saved.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" TORCH_ELASTIC_SHUTDOWN_TIMEOUT=7000
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --kill-on-bad-exit=1 --cpu-bind=none .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$first:$((29500 + SLURM_JOB_ID % 1000))" --rdzv-id "$SLURM_JOB_ID" train.py "${flags[@]}"
