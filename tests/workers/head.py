"""Resident memory of log-probs, entropy and backward at V = 151,936, for few tokens and for many."""

import json
import resource

import torch

import moe
from launch.cold_start import init_weights
from launch.plan import PUBLISHED

V, D = 151936, 8
sizes = {
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
sizes |= {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "vocab_size": V}

model = init_weights(moe.MoETransformer(moe.MoEConfig.from_dict(PUBLISHED | sizes)), 0)
peaks = []
for tokens in (1024, 4096):
    hidden = torch.randn(tokens, D, requires_grad=True)
    logp, entropy = model.logprobs(hidden, torch.randint(V, (tokens,)))
    logp.sum().backward()
    assert hidden.grad.abs().sum() > 0 and entropy.mean() > 11
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps(peaks))
