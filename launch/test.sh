#!/usr/bin/env bash
# The tests, on any machine: set-up if needed, then pytest on two cores. Needs no GPU, and no network once installed.
# Usage: bash launch/test.sh [--all] [pytest arguments, such as tests/test_formulation.py]
# --all adds those that are marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
exec .venv/bin/python -m pytest -q -n 2 --dist loadfile --durations=10 "$@"
