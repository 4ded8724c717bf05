"""What a checkpoint directory says about its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvlens import KvlensError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class ModelError(KvlensError):
    """A checkpoint that cannot be served; the message says why and what would do."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder: rotary positions, grouped-query attention, RMS norms, a gated MLP. Sizes are elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    """Empty, or of type linear or llama3."""
    context_length: int
    """Tokens of prompt and answer together."""
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read `config.json`. Raises ModelError for what is missing, unreadable or not supported."""
        raw = read_json(directory / "config.json")
        architecture = (raw.get("architectures") or ["unknown"])[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(f"{directory} has architecture {architecture}; kvlens serves {', '.join(ARCHITECTURES)}")
        if raw.get("quantization_config"):
            raise ModelError(f"{directory} is quantised, which kvlens does not read: give a float checkpoint")
        if raw.get("use_sliding_window") or (architecture == "MistralForCausalLM" and raw.get("sliding_window")):
            raise ModelError(f"{directory} uses a sliding window, which kvlens does not serve yet")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{directory} uses activation {raw['hidden_act']}; kvlens serves silu")
        try:
            return cls._from(raw, architecture, _eos_ids(directory, raw))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{directory / 'config.json'} lacks a usable {error}") from None

    @classmethod
    def _from(cls, raw: dict[str, Any], architecture: str, eos_ids: tuple[int, ...]) -> ModelConfig:
        heads = int(raw["num_attention_heads"])
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(raw.get("attention_bias"))
        return cls(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            intermediate_size=int(raw["intermediate_size"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope),
            context_length=int(raw["max_position_embeddings"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            # Qwen2 has biases without saying so, and none behind the attention.
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_ids=eos_ids,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )


def resolve_model(name: str) -> Path:
    """The directory of `builtin` or of a local checkpoint. Raises ModelError when there is none."""
    if name == "builtin":
        directory = Path(str(files("kvlens.engine.model") / "builtin"))
        if not (directory / "model.safetensors").is_file():
            raise ModelError(f"the bundled model is missing from {directory}: reinstall kvlens, or give --model DIR")
        return directory
    directory = Path(name)
    if not directory.is_dir():
        raise ModelError(f"there is no model {name}: give `builtin` or a local checkpoint directory")
    return directory


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError when the file is missing or is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a checkpoint directory has config.json, tokenizer.json and weights"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is no JSON object")
    return value


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """Type and numbers of the scaling. Raises KeyError for a number that is not there, ModelError for another type."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rotary scaling of type {kind} is not served; default, linear and llama3 are")
    needed = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_ROPE}[kind]
    return {"rope_type": kind} | {name: float(rope[name]) for name in needed} if needed else {}


def _eos_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    ids = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if ids is None:  # 0 is an id too
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
