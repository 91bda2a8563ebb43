"""Updates on one rollout in many settings: losses, norms and weights into the folder argv[2]."""

import dataclasses
import json
import sys
from pathlib import Path

from safetensors.torch import save_file

import moe
import train

out = Path(sys.argv[2])
base = train.Config.from_flags([*json.loads(sys.argv[1]), "--out", str(out)])
config, data, _, _ = train.prepare(base)
acc = train.start(base)
engine = train.make_engine(base, config, acc, data)
engine.sync(moe.hf_weights(moe.load_pretrained(base.model)))
layout, batches = train.Layout.of(base, acc), {}
for prompts in (8, 3):
    examples = train.dataset.pick(data, 0, base)[:prompts]
    batch = train.sample(engine, examples, 4, (0, 0), base, layout)
    batches[prompts], _ = train.sound_responses(batch, config, base, layout)
engine.close()
cases = [(8, n, mode, again) for n in (1, 4) for mode in ("none", "R2", "R3") for again in (0, 1)]
results = {}
for prompts, n, mode, again in [*cases, (8, 8, "R3", 0), (3, 3, "R2", 1)]:
    c = dataclasses.replace(base, minibatches=n, replay=mode, activation_checkpointing=bool(again))
    model, optimizer = train.make_model(c, config, acc)
    minibatches = train.split(train.advantages(batches[prompts], c, acc), c)
    train.old_logprobs(model, minibatches[1:], c, acc)
    for minibatch in minibatches:
        train.update(model, optimizer, minibatch, c, acc)
    mine = [(m.loss, any(bool(micro.mask.any()) for micro in m.micro_batches)) for m in minibatches]
    name, weights = (
        f"{prompts}-{n}-{mode}-{again}",
        {k: w.clone() for k, w in moe.hf_weights(model)},
    )
    results[name] = {
        "ranks": train.gather_object([mine]),
        "norm": [m.grad_norm for m in minibatches],
    }
    if acc.is_main_process:
        save_file(weights, out / f"{name}.safetensors")
tokens = train.gather_object([[z.tolist() for z in batches[8].tokens]])
if acc.is_main_process:
    (out / "results.json").write_text(json.dumps([results, sum(tokens, [])]))
train.dist.barrier()
train.os._exit(0)
