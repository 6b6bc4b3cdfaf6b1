"""The configuration: every rule is refused with key, layer and rule, all problems at once; round trip."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from golden_files import golden
from tiny import raw_config

from model import ForwardOptions, ModelConfig, TextConfig, VisionConfig

SCHEDULE = [
    # change, and what the message must name: key, layer, rule
    ({"kv_source_layer_ids": [1, 3, 9]}, ["kv_source_layer_ids", "layer 9", "0..5"]),
    ({"kv_source_layer_ids": [-1, 3]}, ["kv_source_layer_ids", "layer -1", "out of range"]),
    ({"index_source_layer_ids": [1, 3, 6]}, ["index_source_layer_ids", "layer 6", "out of range"]),
    ({"engram_layer_ids": [6]}, ["engram_layer_ids", "layer 6", "out of range"]),
    ({"kv_source_layer_ids": [3, 1]}, ["kv_source_layer_ids", "layer 1 follows 3", "strictly increase"]),
    ({"index_source_layer_ids": [1, 3, 3, 5]}, ["index_source_layer_ids", "layer 3 follows 3", "strictly increase"]),
    ({"engram_layer_ids": [4, 1]}, ["engram_layer_ids", "layer 1 follows 4", "strictly increase"]),
    ({"index_source_layer_ids": [1, 5]}, ["kv_source_layer_ids", "layer 3", "index_source_layer_ids"]),
    (
        {"kv_source_layer_ids": [0, 1, 3], "index_source_layer_ids": [0, 1, 3, 5]},
        ["kv_source_layer_ids", "layer 0", "no source"],
    ),
    ({"index_source_layer_ids": [0, 1, 3, 5]}, ["index_source_layer_ids", "layer 0", "no source"]),
    (
        {"kv_source_layer_ids": [3], "index_source_layer_ids": [3, 5]},
        ["compress_ratios", "layer 1", "no kv source"],
    ),
    ({"compress_ratios": [0, 2, 2, 1, 2, 1]}, ["compress_ratios", "layer 4", "layer 3", "equal"]),
    ({"candidate_source_layer_id": 5}, ["candidate_source_layer_id", "layer 5", "kv_source_layer_ids"]),
    ({"candidate_source_layer_id": 0}, ["candidate_source_layer_id", "layer 0", "-1"]),
    ({"compress_ratios": [0, 2, 2, 1, 1]}, ["compress_ratios", "5 entries", "6 layers"]),
    ({"compress_ratios": [0, -2, 2, 1, 1, 1]}, ["compress_ratios", "layer 1", "-2"]),
]
OTHERS = [
    ({"hidden_size": 0}, ["hidden_size", "positive"]),
    ({"o_groups": 3}, ["o_groups", "divide", "num_attention_heads 4"]),
    ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "4 routed experts"]),
    ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "even"]),
    ({"qk_rope_head_dim": 32}, ["qk_rope_head_dim", "head_dim 16"]),
    ({"scoring_func": "softmax"}, ["scoring_func", "sqrtsoftplus"]),
    ({"num_key_value_heads": 2}, ["num_key_value_heads", "only 1"]),
    ({"hiden_size": 32}, ["hiden_size", "unknown"]),
    ({"hidden_size": "32"}, ["hidden_size", "'32'", "int"]),
    ({"hidden_size": True}, ["hidden_size", "True"]),
    ({"compress_ratios": [0, 2.0, 2, 1, 1, 1]}, ["compress_ratios", "list of integers"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.rope_type", "yarn"]),
    ({"engram": True, "engram_max_ngram_size": 1}, ["engram_max_ngram_size", "at least 2"]),
    ({"engram": True, "engram_num_embeddings": [9]}, ["engram_num_embeddings", "1 entries for 2"]),
]


@pytest.mark.parametrize(("change", "named"), SCHEDULE + OTHERS, ids=lambda p: str(p)[:60])
def test_a_broken_rule_is_named(change: dict, named: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(raw_config(**change))
    lines = str(error.value).splitlines()[1:]
    assert any(all(word in line for word in ["text_config.", *named]) for line in lines), lines


def test_all_problems_at_once() -> None:
    raw = raw_config(vision=True, o_groups=3, index_source_layer_ids=[1, 5], compress_ratios=[0, 2, 2, 1, 2, 1])
    raw["vision_config"]["num_attention_heads"] = 3
    raw["tie_word_embeddings"] = True
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(raw)
    keys = ("o_groups", "kv_source_layer_ids", "compress_ratios", "vision_config.num_attention_heads", "tie_word")
    assert all(key in str(error.value) for key in keys), error.value


def test_a_flat_file_is_not_taken_for_the_released_model() -> None:
    """Text keys at the top level would otherwise leave all defaults, a 552B model, in place."""
    with pytest.raises(ValueError, match="hidden_size: belongs into text_config"):
        ModelConfig.from_dict(raw_config()["text_config"])
    ids = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7, "image_token_id": 8, "dtype": "float32"}
    config = ModelConfig.from_dict(raw_config() | ids)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id) == (5, 6, 7, 8)


def test_candidate_source_may_be_off_and_drafter_layers_may_follow() -> None:
    config = ModelConfig.from_dict(raw_config(candidate_source_layer_id=-1))
    assert config.text.candidate_source_layer_id == -1
    longer = raw_config(num_nextn_predict_layers=3, compress_ratios=[0, 2, 2, 1, 1, 1, 0, 0, 0])
    assert ModelConfig.from_dict(longer).text.num_hidden_layers == 6
    longer["text_config"]["compress_ratios"][-1] = 1
    with pytest.raises(ValueError, match="drafter layer 8"):
        ModelConfig.from_dict(longer)


def test_who_uses_whose_entries_and_selection() -> None:
    text = ModelConfig.from_dict(raw_config()).text
    assert [text.kv_source(n) for n in range(6)] == [None, 1, 1, 3, 3, 3]
    assert [text.index_source(n) for n in range(6)] == [None, 1, 1, 3, 3, 5]


def test_defaults_are_the_released_model() -> None:
    """Values of the released config.json, checked one by one where a slip would be silent."""
    text = ModelConfig.from_dict({}).text
    assert text == TextConfig()
    assert (text.hidden_size, text.num_hidden_layers, text.n_routed_experts) == (5120, 40, 384)
    assert (text.head_dim, text.q_lora_rank, text.o_lora_rank, text.o_groups) == (512, 1280, 1024, 8)
    assert text.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert text.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert (text.index_topk, text.candidate_topk_blocks, text.candidate_block_size) == (512, 2048, 8)
    assert (text.rms_norm_eps, text.compress_rope_theta, text.swiglu_limit) == (1e-20, 160000.0, 10.0)


RELEASED = {  # what the released file says beside the defaults of TextConfig and VisionConfig
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": False,
    },
    "vision_config": {"model_type": "deepseek_v41_vision"},
}


def test_the_released_file_comes_back_key_for_key() -> None:
    raw = copy.deepcopy(RELEASED)
    plain = json.loads(json.dumps([dataclasses.asdict(TextConfig()), dataclasses.asdict(VisionConfig())]))
    raw["text_config"] |= {key: value for key, value in plain[0].items() if not key.endswith("os_token_id")}
    raw["text_config"].pop("pad_token_id")
    raw["vision_config"] |= plain[1]
    assert len(raw["text_config"]) == 59 and len(raw["vision_config"]) == 11
    config = ModelConfig.from_dict({**raw, "dtype": "bfloat16"})  # what the weights are stored in is no part of it
    assert json.loads(json.dumps(config.to_dict())) == raw


def test_text_ids_are_written_where_they_are_not_the_released_ones() -> None:
    written = ModelConfig.from_dict(raw_config(eos_token_id=7)).to_dict()["text_config"]
    assert (written["eos_token_id"], "bos_token_id" in written) == (7, False)


@pytest.mark.parametrize("vision", [False, True])
def test_round_trip(vision: bool) -> None:
    raw = raw_config(vision=vision, engram=True)
    raw["quantization_config"] = {"quant_method": "fp8"}
    config = ModelConfig.from_dict(raw)
    written = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(written) == config
    assert written["quantization_config"] == {"quant_method": "fp8"}
    assert written["text_config"]["kv_source_layer_ids"] == [1, 3]
    assert (config.vision is not None) == vision


def test_golden_files_load_and_come_back() -> None:
    for name in ("text", "vision", "heads512", "detail/c2_images_engram_pad"):
        config = ModelConfig.load(golden(name))
        assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_file_that_is_missing_or_broken_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="config.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{,}")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"o_groups": 3}}')
    with pytest.raises(ValueError, match="config.json.*\n.*o_groups"):
        ModelConfig.load(tmp_path)


def test_runtime_names_its_choices() -> None:
    with pytest.raises(ValueError, match="flash.*sparse.*dense"):
        ForwardOptions(attention="flash")
