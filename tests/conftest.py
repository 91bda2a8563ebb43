"""What the tests share: the repository on the path, one thread, fixed seeds, small random Qwen3-MoE folders."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest  # noqa: E402
import torch  # noqa: E402

PAD, EOS = 0, 1
TOKENS = ["<pad>", "<eos>", "\n", *map(chr, range(32, 127))]  # the vocabulary: 98 tokens
CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, as in Qwen3-30B-A3B
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}


def save_model(folder: Path, seed: int = 0, **changes) -> Path:
    """Writes a folder with transformers' own Qwen3-MoE, or Qwen3 (dense=True): CONFIG with `changes`, random weights.

    Of unit gain: logits have a spread of about 1. Routers prefer some experts, and norms are not ones, so that a
    parameter that is left out, swapped or transposed shows.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = "Qwen3" if changes.pop("dense", False) else "Qwen3Moe"
    config = {k: v for k, v in CONFIG.items() if kind == "Qwen3Moe" or k not in EXPERTS}
    config = getattr(transformers, f"{kind}Config")(**{**config, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5, generator=generator)
            else:
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of single characters, ids in the order of TOKENS; transformers and vLLM load it."""
    from tokenizers import Tokenizer, decoders, models

    # Byte-pair encoding without a single merge leaves characters.
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(TOKENS[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names |= {"eos_token": TOKENS[EOS], "pad_token": TOKENS[PAD]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(autouse=True)
def repeatable():
    """One thread and one seed for every test, whatever ran before it."""
    torch.set_num_threads(1)
    torch.manual_seed(2026)


@pytest.fixture(scope="session")
def lottery_file(tmp_path_factory) -> Path:
    """40 prompts of one to seven letters, whose answer is a digit: right by luck, one time in ten."""
    lines = [{"prompt": chr(97 + i % 26) * (1 + i % 7), "answer": i % 10} for i in range(40)]
    path = tmp_path_factory.mktemp("lottery") / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(seed=0, **changes of CONFIG) -> folder with config.json, model.safetensors and tokenizer. Read only: equal calls share it."""
    made = {}

    def make(**arguments) -> Path:
        key = json.dumps(arguments, sort_keys=True)
        if key not in made:
            with torch.random.fork_rng():  # a test's numbers do not depend on who made the folder
                made[key] = save_tokenizer(save_model(tmp_path_factory.mktemp("tiny"), **arguments))
        return made[key]

    return make
