"""Trains the bundled model: byte-level BPE, then a small Llama, saved as an ordinary Hugging Face checkpoint.

    python -m kvlens.engine.model.builtin.train --text novels.txt --out DIR

The text is one plain file, paragraphs on lines of their own and a `CHAPTER` line before each chapter. The last fortieth
is held out. Needs `transformers` (the `dev` extra); serving the result does not.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|endoftext|>"
MASK = "<|mask|>"  # reserved for block diffusion; never occurs in training text
VOCABULARY = 2048
CONTEXT = 1024
HELD_OUT_PART = 40
# (share of the steps, window length in tokens, windows per step): every step sees 4,096 tokens
STAGES = ((0.75, 256, 16), (0.25, CONTEXT, 4))


def chapters(text: str) -> list[str]:
    """The text cut before every chapter heading; joined with END between them, so that the model learns to stop."""
    return [part.strip() for part in re.split(r"(?m)^(?=CHAPTER\b|Chapter\b)", text) if part.strip()]


def train_tokenizer(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        text.split("\n"),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    ids: list[int] = []
    for chapter in chapters(text):
        ids += tokenizer.encode(f"{chapter}\n{END}").ids
    return torch.tensor(ids)


def split(text: str) -> tuple[str, str]:
    """Training part and held-out part; the cut falls on a line."""
    cut = text.index("\n", len(text) - len(text) // HELD_OUT_PART) + 1
    return text[:cut], text[cut:]


@torch.no_grad()
def held_out_nats(model: LlamaForCausalLM, ids: torch.Tensor, window: int) -> float:
    """Mean loss per token over consecutive windows; nats."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(ids) - window, window):
        piece = ids[start : start + window][None]
        total += model(input_ids=piece, labels=piece).loss.item() * (window - 1)
        count += window - 1
    model.train()
    return total / count


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by five Newton-Schulz steps; for matrices.

    In float32 throughout: torch.optim.Muon orthogonalises in bfloat16, which is ten times slower on a CPU without it.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(buffer, group["momentum"]))
                rows, columns = parameter.shape
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end in about [0.7, 1.2]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: torch.Tensor = matrix / (matrix.norm() + 1e-7)
    wide: torch.Tensor = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    ]


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak: 100 steps of warm-up, then a cosine down to 5 %."""
    if step < 100:
        return (step + 1) / 100
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - 100) / max(1, steps - 100)))


def stage_of(step: int, steps: int) -> tuple[int, int]:
    reached = 0.0
    for share, window, batch in STAGES:
        reached += share
        if step < reached * steps:
            return window, batch
    return STAGES[-1][1], STAGES[-1][2]


def train(text: Path, out: Path, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    training_text, held_out_text = split(text.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(training_text)
    ids, held_out = encode(tokenizer, training_text), encode(tokenizer, held_out_text)
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = LlamaForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    bytes_per_token = len(held_out_text.encode()) / len(held_out)
    print(f"{len(ids):,} training tokens, {len(held_out):,} held out, {parameters:,} parameters", flush=True)

    opts = optimisers(model)
    peaks = [group["lr"] for opt in opts for group in opt.param_groups]
    started = time.monotonic()
    for step in range(steps):
        window, batch = stage_of(step, steps)
        starts = torch.randint(len(ids) - window, (batch,))
        piece = torch.stack([ids[s : s + window] for s in starts.tolist()])
        loss = model(input_ids=piece, labels=piece).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        groups = [group for opt in opts for group in opt.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * learning_rate(step, steps)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == steps - 1:
            nats = held_out_nats(model, held_out, CONTEXT)
            bits = nats / math.log(2) / bytes_per_token
            seconds = time.monotonic() - started
            print(
                f"step {step} loss {loss.item():.3f} held-out {nats:.4f} nats {bits:.4f} bits/byte {seconds:.0f} s",
                flush=True,
            )
            save(model, tokenizer, out, steps=step + 1, nats=nats, bits=bits)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path, *, steps: int, nats: float, bits: float) -> None:
    """config.json, model.safetensors (bf16), tokenizer.json, and training.json with what the model card states."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(out)
    model.to(torch.float32).load_state_dict(state)
    (out / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    facts = {"steps": steps, "held_out_nats_per_token": round(nats, 4), "held_out_bits_per_byte": round(bits, 4)}
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.text, arguments.out, arguments.steps, arguments.seed)
