"""Checkpoints: what is read, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlens.engine.model.config import ModelConfig, ModelError, resolve_model
from kvlens.engine.model.load import load_model
from kvlens.engine.model.tokenizer import Tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled model, to be spoilt."""
    for file in resolve_model("builtin").iterdir():
        if file.suffix in (".json", ".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(directory: Path, **values) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_the_bundled_models_shape(copy: Path) -> None:
    config = ModelConfig.load(copy)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (6, 6, 2, 32)
    assert (config.context_length, config.vocab_size, config.eos_ids) == (1024, 2048, (0,))
    assert config.tied_embeddings and not config.rope_scaling and config.dtype == "bfloat16"


def test_older_names_of_settings_are_read_too(copy: Path) -> None:
    change(copy, rope_parameters=..., rope_theta=5e5, dtype=..., torch_dtype="float16", head_dim=...)
    (copy / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    config = ModelConfig.load(copy)
    assert (config.rope_theta, config.dtype, config.head_dim, config.eos_ids) == (5e5, "float16", 32, (0, 7))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "has architecture GPT2LMHeadModel; kvlens serves LlamaForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "is quantised, which kvlens does not read"),
        ({"use_sliding_window": True}, "uses a sliding window"),
        ({"hidden_act": "gelu"}, "uses activation gelu; kvlens serves silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaling of type yarn is not served"),
        ({"hidden_size": ...}, "lacks a usable 'hidden_size'"),
        ({"vocab_size": 100}, r"model.embed_tokens.weight of .* is \(2048, 192\), config.json says \(100, 192\)"),
        ({"num_hidden_layers": 7}, "has no tensor model.layers.6.input_layernorm.weight"),
        ({"num_hidden_layers": 5}, "has 9 tensors nobody asked for, e.g. model.layers.5"),
        ({"tie_word_embeddings": False}, "has no lm_head.weight, and config.json does not tie it"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(copy: Path, values, says) -> None:
    change(copy, **values)
    with pytest.raises(ModelError, match=says):
        load_model(copy, torch.float32, CPU)


def test_missing_and_broken_files_are_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(copy, torch.float32, CPU)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing: kvlens reads weights in safetensors"):
        load_model(copy, torch.float32, CPU)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        ModelConfig.load(copy)
    with pytest.raises(ModelError, match="there is no model /nowhere: give `builtin` or a local checkpoint directory"):
        resolve_model("/nowhere")


def test_weights_in_several_files_are_one_model(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, copy / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load_model(resolve_model("builtin"), torch.float32, CPU)
    sharded = load_model(copy, torch.float32, CPU)
    assert torch.equal(whole._layers[3].qkv, sharded._layers[3].qkv)


# -- tokenizer --------------------------------------------------------------------------------------------------------


def test_text_comes_back_from_its_tokens() -> None:
    tokenizer = Tokenizer(resolve_model("builtin"))
    text = "“It is — a truth,” said Élise. 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, *tokenizer.encode("end"), 0]) == "end"


def test_a_template_of_the_checkpoint_shapes_the_chat(copy: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    plain = Tokenizer(copy)
    assert plain.decode(plain.chat(messages)) == "Hi\nHo\n"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
    settings = {"chat_template": template, "eos_token": {"content": "E"}}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(copy)
    assert tokenizer.decode(tokenizer.chat(messages)) == "<user>Hi<assistant>HoE"
    (copy / "chat_template.jinja").write_text("{{ raise_exception('users first') }}")
    with pytest.raises(ValueError, match="the chat template refuses these messages: users first"):
        Tokenizer(copy).chat(messages)


def test_a_template_cannot_reach_out_of_its_sandbox(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="the chat template refuses"):
        Tokenizer(copy).chat([])


def test_a_tokenizer_that_is_missing_or_broken_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(copy)
