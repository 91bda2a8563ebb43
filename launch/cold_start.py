"""Makes the embedded toy: a 1.8M-parameter Qwen3-MoE that adds rightly when greedy and half the time when sampled.

    python launch/cold_start.py --out runs/cold-start
    python launch/cold_start.py --out runs/cold-sort --demonstrations sort.jsonl      # {"prompt": .., "response": ..}

Hardware: 2 CPU cores, 65 to 100 s, 1 GB. Expect a loss of 0.06 nats a token, greedy accuracy 1.00,
and reward 0.50 at temperature 1. Last run 2026-12-03.

The demonstrations write 1234+5678= out as "4+8+0=12 3+7+1=11 2+6+1=09 1+5+0=06 #06912": columns a + b + carry from
the right, then the answer. In each column the demonstrator errs with probability r = --error-rate: it flips the carry
or is off by one, and copies what it wrote into the answer. A model that has learned this gives the right column
probability 1 - r, so its greedy answer is right, and a sampled one with probability (1 - r)^4, 0.50 for r = 0.16.
The errors are what policy gradient has to remove.

The folder is an ordinary checkpoint, made once: a second call with the same settings, code and torch leaves it alone.
A character's token is its ASCII code, so any plain text can be a prompt (with its response up to 511 characters); a
file of --demonstrations makes the model of a task of your own. The same seed gives the same bits.
"""

import argparse
import hashlib
import inspect
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

# Threads that spin for long while they wait (the default) made this 7 times slower beside another job.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch loads

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.lib.data import addition, json_lines
from moe import MoEConfig, MoETransformer, save_pretrained

PAD, EOS, UNK = 0, 1, 2  # control codes, which no text holds
ENDS = {"eos_token_id": EOS, "pad_token_id": PAD}
CONFIG = ENDS | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "float32",
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 10000.0,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
BATCH, PEAK_LR, INIT_STD = 64, 3e-3, 0.04
STAMP = "cold_start.stamp"  # what the folder was made with


def columns(prompt: str, error_rate: float, rng: random.Random) -> str:
    """The worked response, columns from the right, a + b + carry = two digits: for 1234+5678= it is
    "4+8+0=12 3+7+1=11 2+6+1=09 1+5+0=06 #06912". Half of the errors flip a carry, half put a sum off by one."""
    a, b = prompt.rstrip("=").split("+")
    written, carry, digits = [], 0, ""
    for x, y in zip(reversed(a), reversed(b), strict=True):
        kind = rng.choice(("carry", "sum")) if rng.random() < error_rate else None
        carry = 1 - carry if kind == "carry" else carry
        total = int(x) + int(y) + carry
        if kind == "sum":  # and stays within 00 and 19
            total += {0: 1, 19: -1}.get(total) or rng.choice((-1, 1))
        written.append(f"{x}+{y}+{carry}={total:02}")
        carry, digits = total // 10, f"{total % 10}{digits}"
    return " ".join([*written, f"#{carry}{digits}"])


def places(prompt: str, error_rate: float, rng: random.Random) -> str:
    """Left to right by place value, the carries at the end: "1+5=06 2+6=08 3+7=10 4+8=12 #06912". An error puts a sum
    off by one, and the answer with it."""
    a, b = prompt.rstrip("=").split("+")
    sums = [int(x) + int(y) for x, y in zip(a, b, strict=True)]
    sums = [slip(s, 18, error_rate, rng) for s in sums]
    answer = sum(s * 10**i for i, s in enumerate(reversed(sums)))
    written = [f"{x}+{y}={s:02}" for x, y, s in zip(a, b, sums, strict=True)]
    return " ".join([*written, f"#{answer:0{len(a) + 1}}"])


def running(prompt: str, error_rate: float, rng: random.Random) -> str:
    """The second number added place by place: "+5000=06234 +0600=06834 +0070=06904 +0008=06912 #06912". An error puts
    a digit of the running total off by one."""
    a, b = prompt.rstrip("=").split("+")
    total, written, width = int(a), [], len(b)
    for i, digit in enumerate(b):
        place = 10 ** (width - 1 - i)
        step = int(digit) * place
        total += step + place * (slip(5, 10, error_rate, rng) - 5)
        total = max(0, min(total, 10 ** (width + 1) - 1))
        written.append(f"+{step:0{width}}={total:0{width + 1}}")
    return " ".join([*written, f"#{total:0{width + 1}}"])


def slip(number: int, largest: int, error_rate: float, rng: random.Random) -> int:
    """Now and then off by one, but within 0 and the largest."""
    if rng.random() >= error_rate:
        return number
    return number + ({0: 1, largest: -1}.get(number) or rng.choice((-1, 1)))


# name -> (prompt, error rate, random numbers) -> flawed response
STYLES = {"columns": columns, "places": places, "running": running}


def additions(n: int, seed: int, error_rate: float, style: str) -> list[tuple[str, str]]:
    """n prompts of the task, each with a flawed response."""
    rng = random.Random(seed)
    problems = addition(n, 10**9 + seed)  # not those that train.py draws with a small seed
    prompts = [problem["prompt"] for problem in problems]
    return [(prompt, STYLES[style](prompt, error_rate, rng)) for prompt in prompts]


def of_file(path: Path, n: int, seed: int) -> list[tuple[str, str]]:
    """n prompts with their responses, out of JSON lines, in a new order each time round. ValueError names a bad line."""
    longest, found, picked = CONFIG["max_position_embeddings"] - 1, [], []
    for number, row in json_lines(path):
        try:
            pair = (row["prompt"], row["response"])
            codes = bytes("".join(pair), "ascii")
            fine = pair[0] and min(codes) > UNK and len(codes) <= longest
        except (ValueError, KeyError, TypeError):
            fine = False
        if not fine:
            needs = f'"prompt" and "response", ASCII text of up to {longest} characters together'
            raise ValueError(f"{path}:{number}: needs {needs}")
        found.append(pair)
    if not found:
        raise ValueError(f"{path}: no demonstrations in it")
    rng = random.Random(seed)
    while len(picked) < n:
        picked += rng.sample(found, len(found))
    return picked[:n]


def encode(pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Prompt, response, EOS, padding: tokens (n, T), and a mask (n, T) that is true on response and EOS."""
    rows = [torch.tensor([*(prompt + response).encode(), EOS]) for prompt, response in pairs]
    tokens = pad_sequence(rows, batch_first=True, padding_value=PAD)
    starts = torch.tensor([len(prompt) for prompt, _ in pairs])
    return tokens, (torch.arange(tokens.shape[1]) >= starts[:, None]) & (tokens != PAD)


@torch.no_grad()
def init_weights(model: MoETransformer, seed: int, std: float = 0.02) -> MoETransformer:
    """Normal(0, std) for every matrix, ones for the norms. The same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.fill_(1.0) if "norm" in name else p.normal_(0.0, std, generator=generator)
    return model


def train(data: Tensor, mask: Tensor, seed: int) -> tuple[MoETransformer, float]:
    """One pass over data (n, T) -> model and the mean loss of the last tenth, nats per token of the mask (n, T)."""
    torch.set_num_threads(2)  # sums depend on how they are split: the same on every machine
    torch.use_deterministic_algorithms(True)
    model = init_weights(MoETransformer(MoEConfig.from_dict(CONFIG)), seed, INIT_STD)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses, batches = [], list(zip(data.split(BATCH), mask.split(BATCH), strict=True))
    for step, (tokens, learn) in enumerate(
        bar := tqdm(batches, desc="cold start", mininterval=1.0, disable=None)
    ):
        hidden, _ = model(tokens, lengths=(tokens != PAD).sum(1))
        logp, _ = model.logprobs(hidden[:, :-1][learn[:, 1:]], tokens[learn])
        loss = -logp.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = (step + 0.5) / len(batches)
        warm_up, cosine = 10 * done, 0.5 + 0.5 * math.cos(math.pi * done)
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(warm_up, cosine)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    last = losses[-len(losses) // 10 :]
    return model, sum(last) / len(last)


def write_tokenizer(out: Path) -> None:
    """One token a character, its id the ASCII code; anything else is unk."""
    special = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK}
    vocab = special | {chr(i): i for i in range(3, 128)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>"))  # no merges: characters
    tokenizer.decoder = decoders.Fuse()  # joins without spaces
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {f"{token[1:-1]}_token": token for token in special}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_folder(model: MoETransformer, out: Path, stamp: str) -> None:
    """Writes beside `out` and renames: a run that is killed at any moment leaves no half-made `out`."""
    with TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as beside:
        new = Path(beside) / "new"
        save_pretrained(model, new)
        write_tokenizer(new)
        (new / "generation_config.json").write_text(json.dumps(ENDS, indent=2) + "\n")
        (new / STAMP).write_text(stamp)
        if out.exists():
            out.rename(Path(beside) / "old")
        new.rename(out)


def stamp_of(args: argparse.Namespace) -> str:
    """Everything that the weights depend on, as text."""
    files = [Path(__file__), Path(inspect.getfile(MoETransformer))]
    code = b"".join(file.read_bytes() for file in files) + inspect.getsource(addition).encode()
    code += args.demonstrations.read_bytes() if args.demonstrations else b""
    made_with = {"torch": torch.__version__, "code": hashlib.sha256(code).hexdigest()}
    return json.dumps(vars(args) | made_with | {"out": None}, indent=2, default=str)


def make(args: argparse.Namespace) -> str:
    """Makes the folder args.out unless it is there -> what to tell. ValueError names a wrong flag."""
    began, out, stamp = time.time(), args.out.resolve(), stamp_of(args)
    if args.steps < 1 or not 0 <= args.error_rate <= 1:
        raise ValueError("--steps must be at least 1, --error-rate between 0 and 1")
    found = out / STAMP
    if found.is_file() and found.read_text() == stamp:
        return "already made with these settings, left alone"
    if out.exists() and not found.is_file():
        raise ValueError(f"--out {args.out}: exists, and cold_start.py did not make it")
    out.parent.mkdir(parents=True, exist_ok=True)
    n = args.steps * BATCH
    if args.demonstrations:
        pairs = of_file(args.demonstrations, n, args.seed)
    else:
        pairs = additions(n, args.seed, args.error_rate, args.style)
    model, loss = train(*encode(pairs), args.seed)
    write_folder(model, out, stamp)
    size = sum(p.numel() for p in model.parameters())
    return f"{size:,} parameters, {time.time() - began:.0f} s, loss {loss:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/cold-start"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of weights, problems and errors")
    parser.add_argument("--steps", type=int, default=400, help=f"of {BATCH} demonstrations each")
    parser.add_argument("--error-rate", type=float, default=0.16, help="errors per column")
    parser.add_argument("--style", choices=STYLES, default="columns", help="of the scratchpad")
    own = "JSON lines with prompt and response, in place of addition"
    parser.add_argument("--demonstrations", type=Path, help=own)
    args = parser.parse_args()
    try:
        print(f"{args.out}: {make(args)}")
    except (OSError, ValueError) as error:
        print(f"cold_start.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
