"""What a configuration costs, against the tensors and products of real small models and the released numbers."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import ForwardOptions, ModelConfig, VisionConfig, build_model, count
from model.layout import build_layout
from tests.model.tiny import tiny_config, tiny_model, tokens


@pytest.fixture(scope="module")
def released():
    """The released configuration on the meta device."""
    return build_model(ModelConfig(vision=VisionConfig()), device="meta")


def test_released_parameters(released) -> None:
    counts = count.parameters(released)
    total = sum(parameter.numel() for parameter in released.parameters())
    assert sum(counts.values()) == total == 748_979_922_544
    backbone = total - sum(counts[part] for part in count.OUTSIDE_BACKBONE)
    assert round(backbone / 1e9) == 552
    assert round(counts["Engram tables"] / 1e9, 1) == 196.6


def test_released_active_parameters(released) -> None:
    active = count.active_parameters(released)
    assert (round(active.prefill / 1e9), round(active.decode / 1e9)) == (8, 16)


def test_released_kv_is_890_bytes() -> None:
    parts = count.kv_bytes(ModelConfig().text)
    assert parts == {
        "main KV values": 2.5 * 256,
        "main KV scales": 2.5 * 32,
        "index key values": 2.5 * 64,
        "index key scales": 2.5 * 4,
    }
    assert sum(parts.values()) == 890
    assert count.window_kv_bytes(ModelConfig().text) == 40 * 128 * (512 + 16)


def test_parts_are_those_of_the_names() -> None:
    built = tiny_model(engram=True, vision=True)
    counts = count.parameters(built)
    assert all(counts.values())
    assert counts["embedding"] == built.embed.weight.numel() and counts["head"] == built.head.weight.numel()
    assert counts["Engram tables"] == sum(b.engram.embed.weight.numel() for b in built.layers if b.engram)
    assert counts["routed experts"] == sum(p.numel() for b in built.layers for p in b.ffn.experts.parameters())
    assert counts["vision"] == sum(
        p.numel()
        for name, p in built.named_parameters()
        if name.split(".")[0] in ("vision", "aligner") or "image_" in name
    )


def test_prefill_uses_what_the_last_entries_depend_on() -> None:
    """Parameters with a gradient from the last kv source's entries and keys, and the indexers on the way to them."""
    built = tiny_model(ForwardOptions(kv_quant=True), engram=True, engram_layer_ids=[1, 3])
    ids = tokens(1, 64)
    last = max(built.config.text.kv_source_layer_ids)
    shared = built.run_backbone(ids, build_layout(built.config.text, ids), None, None, None).blocks[last].shared
    (shared.compressed_kv.sum() + shared.index_keys.sum()).backward()
    used = 0.0
    for name, parameter in built.named_parameters():
        if name.startswith("embed.") or ".engram.embed." in name:
            continue
        selects = ".indexer." in name and count.layer_of(name) < last
        if selects or parameter.grad is not None:
            used += parameter.numel() * (0.5 if ".experts." in name and "shared" not in name else 1)
    assert count.active_parameters(built).prefill == used


def test_all_experts_active_is_the_backbone_without_its_lookups() -> None:
    built = tiny_model(engram=True, vision=True, num_experts_per_tok=4)
    counts = count.parameters(built)
    lookups = sum(counts[part] for part in (*count.OUTSIDE_BACKBONE, "embedding"))
    assert count.active_parameters(built).decode == sum(counts.values()) - lookups


def test_projection_flops_are_the_products_run() -> None:
    """All `mm` of a forward: every projection but wo_a and the experts, which run as batched and grouped products."""
    built, length = tiny_model(engram=True), 64
    ids = tokens(1, length)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(ids)
    ran = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    config = built.config.text
    costs = count.flops(built, length)
    products = (
        "attention",
        "shared experts",
        "routers",
        "indexers",
        "compressors",
        "Engram projections",
        "head",
        "mHC",
    )
    expected = length * sum(costs[part].forward for part in products)
    n, d, layers = config.hc_mult, config.hidden_size, config.num_hidden_layers
    expected -= length * 2 * layers * 2 * (2 * n + n * n) * d  # mixing streams is no product
    expected -= length * 2 * sum(block.attn.wo_a.weight.numel() for block in built.layers)
    assert ran == pytest.approx(expected, rel=1e-12)
    experts = 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size * layers
    assert costs["routed experts"].forward == 2 * experts


def test_attention_and_index_flops_count_visible_keys() -> None:
    built, length = tiny_model(), 64
    config = built.config.text
    keys = entries = 0
    for t in range(length):
        for layer in range(config.num_hidden_layers):
            ratio = config.ratio(layer)
            seen = (t + 1) // ratio if ratio else 0
            keys += min(t + 1, config.sliding_window) + min(seen, config.index_topk)
            if layer in config.index_source_layer_ids:
                entries += min(seen, 3 * 4) if layer == 5 else seen  # layer 5 chooses among 3 blocks of 4
    costs = count.flops(built, length)
    assert costs["attention over keys"].forward * length == pytest.approx(keys * 4 * 4 * 16)
    assert costs["index scores"].forward * length == pytest.approx(entries * 2 * 16 * (12 + 1))


class Allocations(TorchDispatchMode):
    """Every storage that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.made or self.made[storage._cdata][0].expired():
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, but: set[int]) -> int:
        return sum(size for key, (ref, size) in self.made.items() if key not in but and not ref.expired())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("streams", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize(
    "wide",
    [{}, {"hidden_size": 96, "hc_mult": 2, "num_experts_per_tok": 3, "n_routed_experts": 12, "q_lora_rank": 40}],
    ids=["narrow", "wide"],
)
def test_activations_are_what_a_forward_leaves_behind(bf16: bool, recompute: bool, streams: str, wide: dict) -> None:
    heads = {"head_dim": 32, "index_head_dim": 32}  # multiples of the quantisers' groups, or their padding is kept too
    config, length = tiny_config(engram=True, **heads, **wide), 256
    token_map = torch.arange(config.text.vocab_size) % 50
    runtime = ForwardOptions(recompute=recompute, stream_dtype=streams)
    built = build_model(config, runtime, token_map)
    own = {tensor.untyped_storage()._cdata for tensor in [*built.parameters(), token_map]}
    ids = tokens(1, length)
    denominators = built.loss_denominators(ids, ids)
    with Allocations() as allocations:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses = built.losses(ids, ids, denominators)
        alive = allocations.alive(own)
    assert losses.total.isfinite()
    widths = count.Widths(2 if bf16 else 4, 2 if streams == "bf16" else 4)
    parts = count.activation_bytes(config, widths, recompute)
    parts.pop(count.RECOMPUTED, None)  # comes in the backward
    expected = length * sum(parts.values()) + count.head_gradient_bytes(config)
    if bf16 and not recompute:
        expected += sum(2 * parameter.numel() for _, parameter in count.autocast_copies(built))
    # Positions, rotations and slots of the batch count for nothing at real widths and are left out.
    assert 0 <= alive - expected < 224 * length
