"""How much memory hf_weights takes, on two ranks, with a consumer that keeps a layer."""

import json
import os
import sys
from pathlib import Path

import torch

import moe
import train
from launch.cold_start import CONFIG

sizes = {
    "num_hidden_layers": 16,
    "hidden_size": 512,
    "num_experts": 16,
    "moe_intermediate_size": 512,
}
config = moe.MoEConfig.from_dict(CONFIG | sizes)


def fill(model, folder):
    for p in model.parameters():
        p.data.to_local().fill_(0.5)  # memory counts once it is written to


def memory(name):
    return int(next(x for x in open("/proc/self/status") if x.startswith(name)).split()[1]) * 1024


moe.load_weights = fill
c = train.Config()
acc = train.start(c)
model, optimizer = train.make_model(c, config, acc)
layer = sum(p.numel() for p in model.layers[0].parameters()) * 4
whole, sent, held, last, peaks = moe.stored_shapes(config), 0, [], None, []
for _ in moe.hf_weights(model):  # what comes once, such as the buffers of the process group
    pass
for dtype in (None, torch.bfloat16):
    acc.wait_for_everyone()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = memory("VmRSS")
    for name, tensor in moe.hf_weights(model, dtype):
        assert tuple(tensor.shape) == whole[name] and tensor.flatten()[-1] == 0.5
        if (
            place := name.split(".")[:3]
        ) != last:  # as vLLM: copies wait until their layer is complete
            held, last = [], place
        held.append(tensor.to(torch.bfloat16, copy=True))
        sent += tensor.numel()
    held = []
    peaks.append(memory("VmHWM") - before)
    del tensor
total = sum(p.numel() for p in model.parameters())
assert sent == 2 * total, (sent, total)
if acc.is_main_process:
    print("RESULT", json.dumps([total * 4, layer, *peaks]), flush=True)
acc.wait_for_everyone()
acc.end_training()
sys.stdout.flush()
os._exit(0)
