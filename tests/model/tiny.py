"""A small configuration with every mechanism, models with lively random weights, and batches for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import model.attention
import model.cache.pages
import model.indexer
from model import DeepseekV41, Drafter, ForwardOptions, LossWeights, ModelConfig, build_drafter, build_model
from model.layout import SequenceLayout, build_layout
from model.vision import END, IMAGE, NEWLINE, START

# Layers: window, Full (ratio 2), Reuse, Full (ratio 1, candidate source), Reuse, Reindex.
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 16,  # with few heads, entries whose dots are all negative tie at a score of exactly 0
    "index_head_dim": 12,
    "index_topk": 5,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
    "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
    "swiglu_limit": 1.0,
}
ENGRAM = {
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 40,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_compressed_vocab_size": 50,
}
VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "patch_size": 2,
    "downsample_ratio": 3,
}

GRIDS = [(3, 5), (6, 3), (3, 5)]


def raw_config(vision: bool = False, engram: bool = False, **text) -> dict:
    """A fresh copy of the configuration in the released JSON shape, with some text keys changed."""
    raw = {"text_config": copy.deepcopy(TEXT), "image_token_id": 3}
    raw["text_config"].update(copy.deepcopy(ENGRAM) if engram else {})
    raw["text_config"].update(text)
    if vision:
        raw["vision_config"] = dict(VISION)
    return raw


def tiny_config(**changes) -> ModelConfig:
    return ModelConfig.from_dict(raw_config(**changes))


def tiny_model(
    runtime: ForwardOptions | None = None, seed: int = 0, loss_weights: LossWeights | None = None, **changes
) -> DeepseekV41:
    """A model in which everything matters: matrices at 1/sqrt(fan-in), and biases, sinks and mHC bases at random."""
    config = tiny_config(**changes)
    token_map = torch.arange(config.text.vocab_size) % 50 if config.text.engram_layer_ids else None
    return lively(build_model(config, runtime=runtime, token_map=token_map, seed=seed, loss_weights=loss_weights), seed)


DRAFTER = {
    "num_nextn_predict_layers": 2,
    "dspark_target_layer_ids": [2, 4, 5],
    "dspark_noise_token_id": 60,
    "dspark_block_size": 3,
    "dspark_markov_rank": 6,
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 3,
}


def tiny_drafter(runtime: ForwardOptions | None = None, seed: int = 0, **changes) -> Drafter:
    """A drafter in which everything matters, with its backbone."""
    return lively(build_drafter(tiny_model(runtime, seed, **{**DRAFTER, **changes})), seed + 100)


def lively(built: nn.Module, seed: int) -> nn.Module:
    """Random values at the scale at which each kind of parameter matters, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*built.named_parameters(), *built.named_buffers()]:
            if name == "token_map":
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name or name.endswith("scale"):
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.dim() < 2:
                tensor.copy_(0.3 * noise)
            elif "embed" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return built


def tokens(*shape: int, seed: int = 0, vocab: int = 61) -> Tensor:
    return torch.randint(4, vocab, shape, generator=torch.Generator().manual_seed(seed))


def image_batch(grids=GRIDS, length: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """One row: text, then each image as START, rows of IMAGE closed by NEWLINE, END; text behind."""
    types = [-1, -1]
    for h, w in grids:
        types += [START, *([IMAGE] * -(-w // 3) + [NEWLINE]) * -(-h // 3), END]
    types += [-1] * (length - len(types))
    types = torch.tensor([types])
    ids = torch.where(types >= 0, 3, tokens(1, length, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids,
        "labels": torch.where(types >= 0, -100, ids),
        "pixel_values": torch.randn(sum(h * w for h, w in grids), 3, 2, 2, generator=generator),
        "image_grid_hws": torch.tensor(grids),
        "vision_token_types": types,
    }


def pack_of(config: ModelConfig, lengths: list[int]) -> SequenceLayout:
    """One row of packed documents."""
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64)
    return build_layout(config.text, ids, seq_lens=torch.tensor([lengths]))


def gradients(built: DeepseekV41) -> dict[str, Tensor]:
    """Every parameter's gradient; a missing one is an error."""
    missing = [name for name, p in built.named_parameters() if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: p.grad.clone() for name, p in built.named_parameters()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Equal within `tolerance` of each tensor's largest value."""
    assert ours.keys() == theirs.keys()
    for name, a in ours.items():
        b = theirs[name]
        limit = tolerance * max(b.abs().max().item(), 1e-3)
        assert (a - b).abs().max() <= limit, f"{name}: {(a - b).abs().max()} > {limit}"


def switch_rounding_off(setter) -> None:
    """Replace the fake quantisers with the identity, and the cache's formats with none, by `setter(module, name,
    value)`.
    """
    for module, name in (
        (model.attention, "fake_quant_fp8"),
        (model.indexer, "fake_quant_mxfp4"),
    ):
        setter(module, name, lambda x: x)
    for module in (model.attention, model.cache.pages):
        setter(module, "main_kv_format", lambda kv_quant: None)
    for name in ("KV_WINDOW", "KV_INDEX"):
        setter(model.cache.pages, name, None)  # a store without a format is plain


@pytest.fixture
def no_rounding(monkeypatch) -> None:
    """Without the fake quantisers fp32 noise stays noise, so two ways to the same sum can be compared tightly. With
    them, a value within noise of a rounding edge may fall on either side, which side differs from CPU to CPU.
    """
    switch_rounding_off(monkeypatch.setattr)
