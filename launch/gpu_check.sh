#!/usr/bin/env bash
# Everything that only a GPU can show, in one table: parity of vLLM and trainer in bf16 and fp8 over three cycles of
# sleep and wake on the toy; tokens/s of each phase and peak memory on it, and on as many layers of Qwen3-30B-A3B with
# random weights as launch/plan.py says fit, six at most.
# Hardware: one GPU with 80 GB or more (H200: six layers, H100 and A100: two), 64 GB of host memory, 20 GB of disk.
# Time: under 0.13 hours: 8 minutes are a limit that cuts stages off, set-up (3 minutes by estimate, if .venv is not there
# yet) counted in. A stage that fails or is cut off leaves a line in the table and its log in runs/gpu-check/.
# Memory: 122 GB with six layers, 82 GB with two, by launch/plan.py.
# Expected: mean |log mu - log pi_old| below 2e-3 in bf16 and 1e-2 in fp8, 98% and 96% of routes equal, the same in all
# cycles, less under R3; memory while the engine sleeps a few GB. Not yet run (its stages were, on CPUs, made smaller).
# Usage: bash launch/gpu_check.sh; LAYERS=3 for fewer layers
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
setup=$SECONDS out=runs/gpu-check
rm -rf "$out"
mkdir -p "$out"
export PYTHONPATH=$PWD

stage() { # stage NAME LIMIT COMMAND...: output to a log, a line when it ends; never stops the script
  local name=$1 limit=$2 begin=$SECONDS left=$((470 - SECONDS)) code=0
  shift 2
  [ "$left" -gt 5 ] || left=5
  timeout -k 5 "$((limit < left ? limit : left))" "$@" >"$out/$name.log" 2>&1 || code=$?
  echo "$name: $([ "$code" = 0 ] && echo ok || echo "FAILED ($code), see $out/$name.log"), $((SECONDS - begin)) s" | tee -a "$out/stages"
}

cat >"$out/parity.py" <<'PYTHON'
"""Three times: sync, sample with the same seeds, sleep, compare with the trainer. One JSON line a cycle."""
import json, sys, time

import numpy as np
import torch

import moe, replay, rollout, train
from launch import data

dtype, folder = sys.argv[1], "runs/cold-start"
device = "cuda" if torch.cuda.is_available() else "cpu"


def used() -> float:
    free, size = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
    return (size - free) / 1e9


prompts = [example["tokens"] for example in data.load_prompts("addition", folder, 64, 0, 64)]
engine = rollout.Engine(folder, dtype=dtype, max_model_len=128, gpu_memory=0.3)
model = moe.load_pretrained(folder, device, torch.bfloat16)
first = None
for cycle in range(3):
    begin = time.perf_counter()
    engine.sync(moe.hf_weights(model))
    synced = time.perf_counter() - begin
    batch = engine.generate(prompts, 8, max_new_tokens=48, temperature=1.0, seed=0)
    awake = used()
    engine.sleep()
    torch.cuda.empty_cache()
    asleep = used()
    first = first or batch
    same = np.mean([np.array_equal(a, b) for a, b in zip(first.tokens, batch.tokens)])
    sound, dropped = train.usable(batch, model.config)
    micro = sound.pack(range(len(sound)), torch.zeros(len(sound))).to(torch.device(device))
    with torch.no_grad():
        logp, _, live = train.logprobs(model, micro, None, train.Config())
        again, _, _ = train.logprobs(model, micro, micro.experts_rollout, train.Config())
    at = torch.nn.functional.pad(micro.mask[:, 1:], (0, 1))
    agree = replay.routing_agreement(micro.experts_rollout, live, at)[0].mean()
    gaps = [(x - micro.logp_rollout)[micro.mask].abs() for x in (logp, again)]
    row = {"cycle": cycle, "dropped": dropped, "routes_equal": float(agree), "same_tokens": float(same)}
    row |= {"mean": gaps[0].mean().item(), "max": gaps[0].max().item(), "mean_R3": gaps[1].mean().item()}
    row |= {"sync_s": synced, "awake_gb": awake, "asleep_gb": asleep}
    print("PARITY", json.dumps(row), flush=True)
PYTHON

cat >"$out/random_weights.py" <<'PYTHON'
"""A folder with the first layers of Qwen3-30B-A3B's shape, random weights, and the toy's tokenizer."""
import sys

import torch

import moe
from launch.plan import PUBLISHED

with torch.device("meta"):
    model = moe.MoETransformer(moe.MoEConfig.from_dict(PUBLISHED | {"num_hidden_layers": int(sys.argv[1])}))
model = model.to(torch.bfloat16).to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
with torch.no_grad():
    for name, p in model.named_parameters():
        p.fill_(1.0) if "norm" in name else p.normal_(0.0, 0.02)
moe.save_pretrained(model, sys.argv[2], torch.bfloat16, like="runs/cold-start")
PYTHON

cat >"$out/table.py" <<'PYTHON'
"""The table: parity of each cycle, then each run's phases."""
import json, pathlib, re

out = pathlib.Path("runs/gpu-check")
print("\n| engine | cycle | mean | max | mean under R3 | routes equal | same tokens | sync s | GB awake | GB asleep |")
print("|---|---|---|---|---|---|---|---|---|---|")
for dtype in ("bf16", "fp8"):
    for line in re.findall(r"^PARITY (.*)$", (out / f"parity-{dtype}.log").read_text(), re.M):
        r = json.loads(line)
        print(f"| {dtype} | {r['cycle']} | {r['mean']:.1e} | {r['max']:.2f} | {r['mean_R3']:.1e} | {r['routes_equal']:.1%} "
              f"| {r['same_tokens']:.0%} | {r['sync_s']:.2f} | {r['awake_gb']:.1f} | {r['asleep_gb']:.1f} |")
print("\n| run | rollout tok/s | train tok/s | sync s | rollout s | update s | peak GB (torch) | KL k3 | routes equal |")
print("|---|---|---|---|---|---|---|---|---|")
for file in sorted(out.glob("run-*/metrics.jsonl")):
    r = json.loads(file.read_text().splitlines()[-1])
    s, routes = r["seconds"], [x for x in r["routing_agreement"] if x is not None]
    print(f"| {file.parent.name[4:]} | {r['rollout_tokens_per_s']:,.0f} | {r['train_tokens_per_s']:,.0f} | {s['sync']:.2f} "
          f"| {s['rollout']:.2f} | {s['update']:.2f} | {r['peak_memory_gb'] * 1.073741824:.1f} "
          f"| {r['kl_rollout_train_k3']:.1e} | {sum(routes) / len(routes):.1%} |")
PYTHON

stage cold-start 120 .venv/bin/python launch/cold_start.py --out runs/cold-start
stage parity-bf16 90 .venv/bin/python "$out/parity.py" bf16
stage parity-fp8 90 .venv/bin/python "$out/parity.py" fp8
toy=(
  --model runs/cold-start --data addition --steps 5 --prompts-per-step 64 --group-size 8 --max-new-tokens 48
  --rollout-memory 0.3 --replay R3
)
stage toy-fp8 90 .venv/bin/python train.py "${toy[@]}" --rollout-dtype fp8 --out "$out/run-toy-fp8"
flags=(
  --model "$out/moe" --data addition --steps 3 --prompts-per-step 32 --group-size 8 --max-new-tokens 512
  --rollout-memory 0.35 --replay R3 --lr 1e-6 --micro-batch-tokens 16384 --activation-checkpointing
)
case $(nvidia-smi --query-gpu=name --format=csv,noheader || true) in
  *B200*) gpu=B200 ;; *H200*) gpu=H200 ;; *H100*) gpu=H100-80GB ;; *) gpu=A100-80GB ;;
esac
for layers in ${LAYERS:-6 5 4 3 2}; do
  .venv/bin/python launch/plan.py --gpu "$gpu" --gpus 1 --prompt-tokens 16 "${flags[@]}" \
    --model qwen3-30b-a3b --layers "$layers" >"$out/plan.log" && break
done
stage random-weights 90 .venv/bin/python "$out/random_weights.py" "$layers" "$out/moe"
stage moe-fp8 150 .venv/bin/python train.py "${flags[@]}" --rollout-dtype fp8 --out "$out/run-moe-fp8"
stage moe-bf16 120 .venv/bin/python train.py "${flags[@]}" --rollout-dtype bf16 --out "$out/run-moe-bf16"

echo
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || true
date -u +"%F, setup $setup s, all $SECONDS s"
cat "$out/stages"
echo "plan for $layers layers on $gpu: $(tail -n 1 "$out/plan.log")"
.venv/bin/python "$out/table.py"
