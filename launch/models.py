"""The model of a run: a folder, or a name on the Hugging Face hub; with experts or without (imported by train.py)."""

import re
from pathlib import Path

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


def records_routes(c, config: moe.MoEConfig) -> bool:
    """Does anyone read vLLM's routes: replay R3, or the metrics about them? Else the engine need not keep them."""
    return routed(config) and (c.record_routes or c.replay == "R3")


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
