"""The model of a run: a folder, or a name on the Hugging Face hub; with experts or without (imported by train.py)."""

import re
from pathlib import Path

import numpy as np

import moe
from launch.flags import line

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # of a model's repository


def folder(name: str) -> str:
    """`name` where it is a folder, else where the hub's OWNER/MODEL of that name was stored. ValueError if it can't be
    fetched; anything that is no such name comes back as it is."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=WANTED)
    except Exception as error:  # of the HTTP client, the cache or the hub: many kinds
        why = "no such folder (launch/cold_start.py makes the toy's), and the hub gives none of that name"
        raise ValueError(f"--model {name}: {why} ({line(error)})") from None


def routed(config: moe.MoEConfig) -> bool:
    """Has it experts, so that there are routes to record and to replay?"""
    return len(config.dense_layers) < config.num_hidden_layers


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
    return config


def records(batch, config: moe.MoEConfig) -> list[np.ndarray | None]:
    """vLLM's own records of routes; for a dense model, of which there are none, -1 in every layer."""
    if routed(config):
        return batch.routes
    shape = (config.num_hidden_layers, config.num_experts_per_tok)
    return [np.full((len(tokens) - 1, *shape), -1) for tokens in batch.tokens]
