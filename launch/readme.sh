#!/usr/bin/env bash
# README's commands as printed, in their order, in a clean clone of this commit: what a newcomer does.
# Hardware: 2 CPU cores, 8 GB. 0.4 hours, most of it the tests. Last run: see launch/results/README.md.
# Usage: bash launch/readme.sh
set -euo pipefail
cd "$(dirname "$0")/.."
clone=$(mktemp -d)
git clone --quiet . "$clone"
cd "$clone"
awk '/^```$/ { inside = !inside; next } inside' README.md > commands.sh
cat commands.sh
bash -eux commands.sh
echo "every command of README ran, in $clone"
