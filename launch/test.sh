#!/usr/bin/env bash
# Every test, on any machine: set-up if needed, then pytest. No GPU and no network needed once installed.
# Usage: bash launch/test.sh [pytest arguments, such as tests/test_formulation.py -q]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
exec .venv/bin/python -m pytest -q --durations=10 "$@"
