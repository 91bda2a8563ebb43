"""Peak memory of a train step of the 30B model under fake tensors, on argv[1] ranks, in each setting of argv[2]."""

import json
import os
import sys
from contextlib import ExitStack

ranks = int(sys.argv[1])
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8"}
os.environ["MASTER_ADDR"] = "localhost"  # Accelerate wants one for several nodes

import torch
from torch._subclasses import FakeTensorMode, fake_impls
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

import loss
import moe
import rollout
import train
from launch import plan

# A shape that depends on data: the mask of response tokens is all true in this step.
aten, fake = torch.ops.aten, fake_impls.op_implementations_dict
fake[aten.nonzero.default] = lambda mode, f, mask: mask.new_empty(
    mask.numel(), mask.ndim, dtype=torch.long
)
fakes = ExitStack()


class Tracker(FSDPMemTracker):
    def _update_peak_stats(
        self, state
    ):  # the rank's peak; each module's own is a third of the time
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device], self._peak_mem_snap[device] = now["Total"], dict(now)


class Model(moe.MoETransformer):
    def to_empty(
        self, device
    ):  # FSDP2 has made its mesh, which reads numbers; from here on all is fake
        fakes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return super().to_empty(device="cpu")  # a fake "cpu:0", unlike a real one, is not "cpu"


moe.MoETransformer, moe.load_weights = Model, lambda model, folder: None
c = train.Config()
acc = train.start(c)
model, optimizer = train.make_model(c, moe.MoEConfig.from_dict(plan.PUBLISHED), acc)
assert all(isinstance(p, DTensor) for p in model.parameters())


def finish():
    torch.nn.utils.clip_grad_norm_(model.parameters(), c.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


for p in model.parameters():
    p.grad = torch.zeros_like(p)
finish()  # makes the moments; and DTensor works out each operation once, on whole tensors, which the tracker would count
peaks = []
for again, tokens in json.loads(sys.argv[2]):
    model.checkpointing = again
    ids, mask = torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.bool)
    micro = rollout.MicroBatch(ids, None, mask, torch.zeros(1, tokens), torch.ones(1))
    tracker = Tracker(model, optimizer)
    with tracker:
        logp, _, _ = train.logprobs(model, micro, None, c)
        policies = (logp, logp.detach(), micro.logp_rollout)
        value, _ = loss.minirl_loss(*policies, micro.adv, micro.mask, denom=1)
        (value * acc.num_processes).backward()
        finish()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    peaks.append({getattr(k, "value", k): v for k, v in peak.items()})
print(json.dumps(peaks), flush=True)
os._exit(0)
