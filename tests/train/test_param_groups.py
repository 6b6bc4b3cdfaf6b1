"""The rule table against the released names and the report's assignment, written out by hand here."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from model import ModelConfig, build_model
from optim import assign
from train import param_groups

report_rules = partial(param_groups.report_rules, engram_lr_factor=5.0)
adamw_rules = partial(param_groups.adamw_rules, engram_lr_factor=5.0)
D, V, H, HEAD, Q_LORA, O_GROUPS, O_LORA, FF, E, N, INDEX_HEADS, INDEX_DIM = 32, 50, 4, 16, 24, 2, 8, 12, 6, 2, 3, 16
VISION = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 20, "patch_size": 2}


def _config(vision=True, engram=True, csa=True):
    text = {
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": H,
        "head_dim": HEAD,
        "qk_rope_head_dim": 8,
        "q_lora_rank": Q_LORA,
        "o_lora_rank": O_LORA,
        "o_groups": O_GROUPS,
        "moe_intermediate_size": FF,
        "n_routed_experts": E,
        "num_experts_per_tok": 2,
        "compress_ratios": [0, 2] if csa else [0, 0],
        "kv_source_layer_ids": [1] if csa else [],
        "index_source_layer_ids": [1] if csa else [],
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "candidate_source_layer_id": -1,
        "hc_mult": N,
        "engram_layer_ids": [1] if engram else [],
        "engram_num_embeddings": [],
        "engram_vocab_size": 20,
        "engram_compressed_vocab_size": 10,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    return ModelConfig.from_dict({"text_config": text, "vision_config": VISION if vision else None})


# Group of an assignment: (method, blocks, lr factor, weight decay, schedule).
MUON = ("muon", None, 1.0, 0.1, "main")
NORM = ("adamw", None, 1.0, 0.1, "main")
VECTOR = ("adamw", None, 1.0, 0.0, "main")
TABLE = ("sinkhorn", None, 1.0, 0.0, "main")


def _blocks(*blocks, schedule="main"):
    return ("muon", blocks, 1.0, 0.1, schedule)


def _expected(config):
    """name -> (shape, assignment), in the released names."""
    mix = (2 + N) * N
    out = {"embed.weight": ((V, D), TABLE), "head.weight": ((V, D), TABLE), "norm.weight": ((D,), NORM)}
    for layer in range(2):
        attn, ffn = f"layers.{layer}.attn.", f"layers.{layer}.ffn."
        for part in ("attn", "ffn"):
            out[f"layers.{layer}.{part}_norm.weight"] = ((D,), NORM)
            out[f"layers.{layer}.hc_{part}.fn"] = ((mix, N * D), MUON)
            out[f"layers.{layer}.hc_{part}.base"] = ((mix,), VECTOR)
            out[f"layers.{layer}.hc_{part}.scale"] = ((3,), VECTOR)
        out |= {
            attn + "wq_a.weight": ((Q_LORA, D), MUON),
            attn + "q_norm.weight": ((Q_LORA,), NORM),
            attn + "wq_b.weight": ((H * HEAD, Q_LORA), _blocks((H, HEAD))),
            attn + "wkv.weight": ((HEAD, D), MUON),
            attn + "kv_norm.weight": ((HEAD,), NORM),
            attn + "wo_a.weight": ((O_GROUPS * O_LORA, H * HEAD // O_GROUPS), _blocks((O_GROUPS, O_LORA))),
            attn + "wo_b.weight": ((D, O_GROUPS * O_LORA), MUON),
            attn + "attn_sink": ((H,), VECTOR),
            ffn + "gate.weight": ((E, D), MUON),
            ffn + "experts.w1": ((E, FF, D), MUON),
            ffn + "experts.w2": ((E, D, FF), MUON),
            ffn + "experts.w3": ((E, FF, D), MUON),
        }
        out |= {ffn + f"shared_experts.{w}.weight": ((FF, D), MUON) for w in ("w1", "w3")}
        out[ffn + "shared_experts.w2.weight"] = ((D, FF), MUON)
    attn, engram = "layers.1.attn.", "layers.1.engram."
    if config.text.kv_source_layer_ids:
        out |= {
            attn + "compressor.wkv.weight": ((HEAD, D), MUON),
            attn + "compressor.wgate.weight": ((HEAD, D), MUON),
            attn + "compressor.norm.weight": ((HEAD,), NORM),
            attn + "indexer.wq_b.weight": ((INDEX_HEADS * INDEX_DIM, Q_LORA), _blocks((INDEX_HEADS, INDEX_DIM))),
            attn + "indexer.weights_proj.weight": ((INDEX_HEADS, D), MUON),
            attn + "indexer.wk.weight": ((INDEX_DIM, HEAD), MUON),
            attn + "indexer.k_norm.weight": ((INDEX_DIM,), NORM),
        }
    if config.text.engram_layer_ids:
        out |= {
            engram + "embed.weight": ((100, 8), ("sinkhorn", None, 5.0, 0.0, "main")),
            engram + "wkv.weight": (((N + 1) * D, 48), MUON),
            engram + "q_weight": ((N, D), NORM),
            engram + "k_weight": ((N, D), NORM),
        }
    if config.vision is not None:
        hidden, heads, block = 24, 3, "vision.blocks.0."
        tower, tower_norm = ("muon", None, 1.0, 0.1, "vision"), ("adamw", None, 1.0, 0.1, "vision")
        tower_vector = ("adamw", None, 1.0, 0.0, "vision")
        wqkv = _blocks((heads, 8), (heads, 8), (1, hidden), schedule="vision")
        out |= {
            "vision.patch_embed.proj.weight": ((hidden, 12), tower),
            "vision.patch_embed.proj.bias": ((hidden,), tower_vector),
            block + "norm1.weight": ((hidden,), tower_norm),
            block + "norm2.weight": ((hidden,), tower_norm),
            block + "attn.wqkv.weight": ((3 * hidden, hidden), wqkv),
            block + "attn.wqkv.bias": ((3 * hidden,), tower_vector),
            block + "attn.wo.weight": ((hidden, hidden), tower),
            block + "attn.wo.bias": ((hidden,), tower_vector),
            block + "mlp.w1.weight": ((40, hidden), tower),
            block + "mlp.w2.weight": ((hidden, 20), tower),
            "vision.norm.weight": ((hidden,), NORM),
            "aligner.w1.weight": ((D, 9 * hidden), MUON),
            "aligner.w1.bias": ((D,), VECTOR),
            "aligner.w2.weight": ((D, D), MUON),
            "aligner.w2.bias": ((D,), VECTOR),
        }
        out |= {f"image_{part}": ((D,), VECTOR) for part in ("start", "end", "newline")}
    return out


def _assigned(rules, expected):
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, (shape, _) in expected.items()]
    out = {}
    for group in assign(named, rules):
        for name, blocks in zip(group.names, group.blocks, strict=True):
            out[name] = (group.method, blocks, group.lr_factor, group.weight_decay, group.schedule)
    return out


@pytest.mark.parametrize("vision", [True, False])
@pytest.mark.parametrize("engram", [True, False])
@pytest.mark.parametrize("csa", [True, False])
def test_report_rules_give_every_released_parameter_its_method(vision, engram, csa):
    config = _config(vision, engram, csa)
    expected = _expected(config)
    assert _assigned(report_rules(config), expected) == {name: assignment for name, (_, assignment) in expected.items()}


def test_the_expected_names_and_shapes_are_the_models():
    """Keeps the list above honest. Table sizes of the tiny Engram are the model's own affair."""
    config = _config()
    model = build_model(config, token_map=torch.arange(V) % 10)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    expected = {name: shape for name, (shape, _) in _expected(config).items()}
    expected["layers.1.engram.embed.weight"] = shapes["layers.1.engram.embed.weight"]
    expected["layers.1.engram.wkv.weight"] = shapes["layers.1.engram.wkv.weight"]
    assert shapes == expected


def test_whole_matrix_switch_changes_the_head_blocks_only():
    config = _config()
    expected = _expected(config)
    heads, whole = (_assigned(report_rules(config, per_head=flag), expected) for flag in (True, False))
    assert {name: whole[name][1] for name in expected if heads[name] != whole[name]} == {
        "layers.0.attn.wq_b.weight": None,
        "layers.1.attn.wq_b.weight": None,
        "layers.1.attn.indexer.wq_b.weight": None,
        "vision.blocks.0.attn.wqkv.weight": ((1, 24), (1, 24), (1, 24)),  # Q, K and V are three matrices
    }


def test_adamw_tables_switch_changes_the_tables_only():
    config = _config()
    expected = _expected(config)
    changed = _assigned(report_rules(config, tables="adamw"), expected)
    for name, (_, assignment) in expected.items():
        assert changed[name] == (("adamw", *assignment[1:]) if assignment[0] == "sinkhorn" else assignment)
    with pytest.raises(ValueError, match="tables: must be 'sinkhorn' or 'adamw', got 'sgd'"):
        report_rules(config, tables="sgd")


def test_adamw_rules_change_the_method_only():
    config = _config()
    expected = _expected(config)
    plain = _assigned(adamw_rules(config), expected)
    assert plain == {name: ("adamw", None, *assignment[2:]) for name, (_, assignment) in expected.items()}


def test_a_new_parameter_is_an_error():
    expected = _expected(_config()) | {"layers.0.attn.surprise.weight": ((4, 4), MUON)}
    with pytest.raises(ValueError, match="surprise"):
        _assigned(report_rules(_config()), expected)
