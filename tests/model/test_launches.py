"""What a micro-batch of the released layer schedule would launch on a GPU, and what its host would wait for.

Counted on the CPU at toy widths, with the chunk sizes of CUDA, forward and backward with recomputation. Triton kernels
are counted on fake tensors, on which each is one operation that runs nothing.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import model.sparse
from model import ForwardOptions, Generator, ModelConfig, Request, build_model
from model.cache.step import Step
from model.parallel.ranks import Parallel
from tests import processes
from tests.model.launches import Launches, kernels_give_zeros
from tests.model.test_parallel import ranks_of

WIDTHS = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "engram_vocab_size": 64,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_compressed_vocab_size": 512,
    "engram_num_embeddings": [],
}
LAYERS = 40


def micro_batch(parallel: Parallel | None = None, kernels: str = "plain", fake: bool = False) -> Launches:
    """One micro-batch of two documents, forward and backward; on fake tensors under autocast in bf16."""
    model.sparse.CHUNK_ELEMENTS = dict.fromkeys(model.sparse.CHUNK_ELEMENTS, model.sparse.CHUNK_ELEMENTS["cuda"])
    config = ModelConfig.from_dict({"text_config": WIDTHS})
    assert config.text.num_hidden_layers == LAYERS
    runtime = ForwardOptions(recompute=True, kernels=kernels)
    built = build_model(config, runtime, token_map=torch.arange(512), parallel=parallel or Parallel())
    ids = torch.randint(5, 500, (1, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[40, 24]])}
    batch["layout"] = built.lay_out(**batch)
    launches = Launches()
    launches.watch_blocks_only(built.layers)
    launches.name_modules(built)
    tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    with tensors, torch.autocast("cpu", torch.bfloat16, enabled=fake), launches.counting():
        total = built.losses(**batch, denominators=built.loss_denominators(**batch)).total
        launches.blocks_only = False
        total.backward()
    return launches


def test_a_micro_batch_stays_within_its_budget(monkeypatch) -> None:
    monkeypatch.setattr(model.sparse, "CHUNK_ELEMENTS", model.sparse.CHUNK_ELEMENTS)
    launches = micro_batch()
    assert launches.total <= 70_000, launches.launched.most_common(20)
    assert launches.total >= 1_000 * LAYERS  # the counter sees them
    assert not launches.waited


@pytest.mark.slow
def test_with_kernels_a_micro_batch_launches_a_sixth_of_that(monkeypatch) -> None:
    """Fake tensors also show that no value decides what is computed: reading one raises."""
    monkeypatch.setattr(model.sparse, "CHUNK_ELEMENTS", model.sparse.CHUNK_ELEMENTS)
    launches = micro_batch(kernels="triton", fake=True)
    assert launches.total <= 12_000, launches.launched.most_common(20)
    for name in ("rms_norm", "clamped_swiglu", "rotate_and_round", "sparse_attention_backward"):
        assert launches.launched[f"narrows::{name}"] >= LAYERS
    assert not launches.waited


def decoding_step(patch: pytest.MonkeyPatch) -> tuple[Launches, int, list[tuple[int, ...]]]:
    """One token of two sequences with kernels, in bf16: what it launches, how many index tensors it moves to the
    device, and the shapes of the tensors that it moves to the CPU.
    """
    kernels_give_zeros(patch)
    patch.setattr(model.sparse, "CHUNK_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 2**27))
    config = ModelConfig.from_dict({"text_config": WIDTHS})
    built = build_model(config, ForwardOptions(kernels="triton"), torch.arange(512), dtype=torch.bfloat16)
    generator = Generator(built, record_routing=True)
    for length in (50, 61):
        generator.submit(Request(tuple(range(5, 5 + length)), 100))
    generator.step()
    generator.step()
    launches, moved, read = Launches(), [], []
    launches.name_modules(built)
    to, on_device = torch.Tensor.to, Step.on_device
    with patch.context() as here, launches.counting():
        here.setattr(Step, "on_device", lambda step, x: moved.append(x) or on_device(step, x))
        here.setattr(torch.Tensor, "to", lambda x, *a, **k: ("cpu" in a and read.append(x)) or to(x, *a, **k))
        generator.step()
    return launches, len(moved), [tuple(x.shape) for x in read]


@pytest.mark.slow
def test_a_decoding_step_stays_within_its_budget(monkeypatch) -> None:
    """All layers share index tensors, and the routing of all layers is read once."""
    launches, moved, read = decoding_step(monkeypatch)
    assert launches.total <= 6_000, launches.launched.most_common(20)
    assert launches.launched["narrows::mhc_expand"] == 2 * LAYERS
    assert moved <= LAYERS
    assert read == [(2 * LAYERS, 2)]  # two experts of two tokens in every layer


def spread(rank: int) -> Counter[str]:
    return micro_batch(Parallel(ranks_of(2), ranks_of(2))).waited


@pytest.mark.slow
@pytest.mark.distributed
def test_expert_exchange_waits_for_its_counts_alone() -> None:
    """Once in the forward of every layer; recomputation uses them again."""
    assert processes.run(2, spread) == [Counter(tolist=LAYERS)] * 2


def test_the_counter_sees_what_waits() -> None:
    """Each of the ways that the model must not use, once."""
    x, launches = torch.arange(4), Launches()
    with launches.counting():
        for wait in (
            lambda: torch.tensor([1, 2]),
            lambda: x.bincount(minlength=4),
            lambda: x.nonzero(),
            lambda: x[x > 2],
            lambda: x.unique(),
            lambda: int(x[0]),
            lambda: bool((x > 2).any()),
            lambda: x.tolist(),
            lambda: x.cpu(),
            lambda: torch.repeat_interleave(x, x),
        ):
            before = launches.waited.total()
            wait()
            assert launches.waited.total() > before
        before = launches.waited.total()
        torch.repeat_interleave(x, x, output_size=6), x.index_select(0, x), x[x]
        assert launches.waited.total() == before
