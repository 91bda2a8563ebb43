#!/usr/bin/env bash
# Installs, then launch/gpu_check.py: what only a GPU can show, in one table. Its docstring says what each stage needs.
# Hardware: one GPU with 80 GB or more (H200: six layers, H100 and A100: two), driver R580 or newer, a C compiler, Python
# 3.11 with its headers; 64 GB of host memory, 20 GB of disk.
# Time: 0.3 hours by estimate, 0.6 at most beside the set-up (10 minutes) and a first, warm part: the sum of the limits.
# Memory: 122 GB with six layers, 82 GB with two, by launch/plan.py.
# Expected: "ok" in each line; mean |log mu - log pi_old| below 2e-3 in bf16 and 1e-2 in fp8, the same in all cycles; memory
# while the engine sleeps a few GB. Not yet run (its stages were, on CPUs, made smaller).
# Usage: bash launch/gpu_check.sh [kernels] [training] [parity] [loop]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
needs_cuda
exec .venv/bin/python launch/gpu_check.py "$@"
