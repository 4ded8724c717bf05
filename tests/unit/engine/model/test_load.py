"""Checkpoints: what is read, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

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


def test_an_end_token_of_id_zero_counts_in_either_file(copy: Path) -> None:
    change(copy, eos_token_id=None)
    (copy / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert ModelConfig.load(copy).eos_ids == (0,)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "has architecture GPT2LMHeadModel; kvlens serves LlamaForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "is quantised, which kvlens does not read"),
        ({"use_sliding_window": True}, "uses a sliding window"),
        ({"hidden_act": "gelu"}, "uses activation gelu; kvlens serves silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaling of type yarn is not served"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks a usable 'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks a usable 'factor'"),
        ({"hidden_size": ...}, "lacks a usable 'hidden_size'"),
        ({"vocab_size": 100}, r"model.embed_tokens.weight of .* is \(2048, 192\), config.json says \(100, 192\)"),
        ({"num_hidden_layers": 7}, "has no tensor model.layers.6.input_layernorm.weight"),
        ({"num_hidden_layers": 5}, "has 9 tensors nobody asked for, e.g. model.layers.5"),
        ({"tie_word_embeddings": False}, "has no lm_head.weight, and config.json does not tie it"),
        ({"attention_bias": True}, r"has no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(copy: Path, values, says) -> None:
    change(copy, **values)
    with pytest.raises(ModelError, match=says):
        load_model(copy, torch.float32, CPU)


SMALL = {
    "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 8, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
VALUE = "model.layers.0.self_attn.v_proj"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({f"{VALUE}.bias": None}, r"has no tensor model\.layers\.0\.self_attn\.v_proj\.bias"),
        ({f"{VALUE}.bias": torch.zeros(1)}, r"v_proj\.bias of .* is \(1,\), config\.json says \(4,\)"),
        (
            {f"{VALUE}.weight": torch.zeros(4, 8, dtype=torch.int8)},
            r"v_proj\.weight of .* is int8: give a float checkpoint",
        ),
        ({"lm_head.weight": torch.zeros(5, 8)}, r"lm_head\.weight of .* is \(5, 8\), config\.json says \(16, 8\)"),
    ],
)
def test_a_tensor_that_is_not_what_the_architecture_has_is_refused(tmp_path: Path, spoil, says) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | spoil
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ModelError, match=says):
        load_model(tmp_path, torch.float32, CPU)


def test_a_bias_that_the_config_does_not_know_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)).save_pretrained(tmp_path)
    change(tmp_path, attention_bias=False)
    with pytest.raises(ModelError, match=r"has 4 tensors nobody asked for, e\.g\. model\.layers\.0\.self_attn"):
        load_model(tmp_path, torch.float32, CPU)


def test_an_index_that_lists_no_files_is_refused(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json has no weight_map"):
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


def test_a_template_may_use_what_published_ones_use(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m | tojson }}{{ strftime_now('%Y') | length }}{% break %}{% endfor %}"
    )
    tokenizer = Tokenizer(copy)
    assert tokenizer.decode(tokenizer.chat([{"content": "<é>"}, {"content": "no"}])) == '{"content": "<é>"}4'


def test_a_template_that_breaks_is_named_at_the_start_or_refuses_the_messages(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages[0].content + 1 }}")
    with pytest.raises(ValueError, match="the chat template refuses these messages: can only concatenate str"):
        Tokenizer(copy).chat([{"content": "Hi"}])
    (copy / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match=r"the chat template of .* cannot be read: Expected an expression"):
        Tokenizer(copy)


def test_a_template_cannot_reach_out_of_its_sandbox(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="the chat template refuses"):
        Tokenizer(copy).chat([])


def test_a_prompt_is_neither_cut_nor_padded_by_settings_left_in_the_tokenizer(copy: Path) -> None:
    whole = Tokenizer(copy).encode("It is a truth universally acknowledged")
    path = copy / "tokenizer.json"
    left = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<|endoftext|>",
        },
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | left))
    assert Tokenizer(copy).encode("It is a truth universally acknowledged") == whole


def test_a_tokenizer_that_is_missing_or_broken_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(copy)
