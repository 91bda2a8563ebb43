"""The model of a run: a folder, or a name on the Hugging Face hub; with experts or without (imported by train.py)."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

import moe
from launch.flags import line

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # of a model's repository


def folder(name: str, wanted: Sequence[str] = WANTED) -> str:
    """`name` where it is a folder, else where the hub's OWNER/MODEL of that name was stored, the `wanted` files of it.
    ValueError if it can't be fetched; anything that is no such name comes back as it is."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=list(wanted))
    except Exception as error:  # of the HTTP client, the cache or the hub: many kinds
        why = "no such folder (launch/cold_start.py makes the toy's), and the hub gives none of that name"
        raise ValueError(f"--model {name}: {why} ({line(error)})") from None


def routed(config: moe.MoEConfig) -> bool:
    """Has it experts, so that there are routes to record and to replay?"""
    return len(config.dense_layers) < config.num_hidden_layers


def records_routes(c, config: moe.MoEConfig) -> bool:
    """Does anyone read vLLM's routes: replay R3, or the metrics about them? Else the engine need not keep them."""
    return routed(config) and (c.record_routes or c.replay == "R3")


def padded(c, config: moe.MoEConfig) -> str:
    """Why vLLM cannot sync these experts in fp8, or "": a shard of no whole blocks of 128 is padded, and a padded layer
    keeps all it was sent, in bf16, until the last layer has come. Read against vLLM 0.30.0; a few MB do not matter."""
    F, tp, layers = config.moe_intermediate_size, c.rollout_tp, config.num_hidden_layers
    kept = 2 * 3 * F * config.hidden_size * config.num_experts * (layers - len(config.dense_layers))
    if c.engine_dtype != "fp8" or F % (128 * tp) == 0 or kept < 2e9:
        return ""
    return f"--rollout-tp {tp} with fp8: {F} / {tp} is no multiple of 128, and {kept / 1e9:.0f} GB would wait on each GPU in a sync"


def open_model(c) -> moe.MoEConfig:
    """The numbers of --model, which becomes a folder if it was a name, so that the run's record holds the commit.
    ValueError names what is wrong with config.json, the weights, or --replay."""
    c.model = folder(c.model)
    config = moe.MoEConfig.from_pretrained(c.model)
    moe.check_weights(config, c.model)
    if c.replay != "none" and not routed(config):
        raise ValueError(f"--replay {c.replay}: {c.model} is dense, it has no experts to replay")
    heads, tp = config.num_attention_heads, c.rollout_tp
    if heads % tp:
        raise ValueError(f"--rollout-tp {tp}: {c.model} has {heads} attention heads")
    if torch.cuda.is_available() and (why := padded(c, config)):
        raise ValueError(why)
    return config
