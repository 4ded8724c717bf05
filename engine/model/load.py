"""The one loader: any local Llama- or Qwen-style checkpoint in safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlens.engine.model.config import ModelConfig, ModelError, read_json
from kvlens.engine.model.llama import Layer, LlamaModel

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(directory: Path, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """Weights of `directory` as `dtype` on `device`.

    Raises ModelError for a missing file, and for tensors that are missing, too many, or of another shape.
    """
    config = ModelConfig.load(directory)
    weights = _Weights(directory, _read_tensors(directory, dtype, device))
    embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    layers = [_layer(weights, config, f"model.layers.{number}.") for number in range(config.layers)]
    norm = weights.take("model.norm.weight", (config.hidden_size,))
    if config.tied_embeddings:
        weights.drop("lm_head.weight")  # some checkpoints repeat the embeddings there
        head = embedding
    elif "lm_head.weight" in weights:
        head = weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    else:
        raise ModelError(f"{directory} has no lm_head.weight, and config.json does not tie it to the embeddings")
    weights.finish()
    return LlamaModel(config, embedding, layers, norm, head)


def _layer(weights: _Weights, config: ModelConfig, at: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = at + "self_attn."
    sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
    biases = [weights.take(f"{attention}{name}.bias", (size,)) for name, size in sizes.items() if config.qkv_bias]
    return Layer(
        input_norm=weights.take(at + "input_layernorm.weight", (hidden,)),
        # One product instead of three, and of two: the same numbers in fewer calls.
        qkv=torch.cat([weights.take(f"{attention}{name}.weight", (size, hidden)) for name, size in sizes.items()]),
        qkv_bias=torch.cat(biases) if biases else None,
        query_norm=weights.take(attention + "q_norm.weight", (config.head_dim,)) if config.qk_norm else None,
        key_norm=weights.take(attention + "k_norm.weight", (config.head_dim,)) if config.qk_norm else None,
        output=weights.take(attention + "o_proj.weight", (hidden, query)),
        output_bias=weights.take(attention + "o_proj.bias", (hidden,)) if config.output_bias else None,
        mlp_norm=weights.take(at + "post_attention_layernorm.weight", (hidden,)),
        gate_up=torch.cat(
            [weights.take(f"{at}mlp.{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
        ),
        down=weights.take(at + "mlp.down_proj.weight", (hidden, inner)),
    )


class _Weights:
    """Tensors by name, each taken once."""

    def __init__(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        self._directory = directory
        self._tensors = tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"{self._directory} has no tensor {name}: is the checkpoint complete?")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} of {self._directory} is {tuple(tensor.shape)}, config.json says {shape}")
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def drop(self, name: str) -> None:
        self._tensors.pop(name, None)

    def finish(self) -> None:
        """Raises ModelError when something was left: a model that is not what it says it is."""
        left = [name for name in self._tensors if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelError(f"{self._directory} has {len(left):,} tensors nobody asked for, e.g. {left[0]}")


def _read_tensors(directory: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    tensors: dict[str, Tensor] = {}
    for shard in _shards(index) if index.is_file() else ["model.safetensors"]:
        path = directory / shard
        if not path.is_file():
            raise ModelError(f"{path} is missing: kvlens reads weights in safetensors")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in FLOATS:  # a conversion would go through, and mean nothing
                        kind = str(tensor.dtype).removeprefix("torch.")
                        raise ModelError(
                            f"{name} of {directory} is {kind}: give a float checkpoint, not a quantised one"
                        )
                    tensors[name] = tensor.to(device, dtype)
        except SafetensorError as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
    return tensors


def _shards(index: Path) -> list[str]:
    """Names of the files that together hold the weights."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index} has no weight_map, which says what file each tensor is in: is the checkpoint complete?"
        )
    return sorted(set(weight_map.values()))
