"""A training step of the released model on one rank of 768, on fake tensors, beside the memory that task=plan gives it.

    python -m tests.train.planning.released_step        (make proof)

Fake tensors have shapes and no values, so the step takes seconds and no memory, and every operation checks its shapes.
The rank has an eighth of a row of 65,536 tokens and one expert in each layer, and routing is even; nothing is
exchanged, and what it would receive are tensors of the right shape. The Engram tables, the embedding and the head are
whole, since the distinct rows of a look-up are not known without values. Weights, gradients and optimizer state are
left out of the comparison, which covers what a micro-batch needs beside them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model.loss
import model.moe
import model.sparse
from model import DeepseekV41, ModelConfig
from model.build import allocate_model
from model.parallel.exchange import RowCounts
from model.parallel.ranks import Parallel, RankGroup
from tests.model.launches import LAUNCH_NOTHING
from train.config.compose import CONF_DIR, open_overrides
from train.config.parse import parse
from train.config.schema import Config
from train.planning import memory
from train.planning.job import as_planned, job_of

RANK = 3  # in its node; neither the first nor the last chunk of the row
LAYOUT = [
    "task=plan", "model=v41_flash", "parallel=cluster", "plan.load_factor=1.0",
    "parallel.dense_shards=1", "parallel.table_shards=1", "parallel.shard_embeddings=false",
]  # fmt: skip


class Bytes(NamedTuple):
    """saved: what the forward pass leaves behind for the backward pass. forward, backward: the most memory at a time
    in each.
    """

    saved: float
    forward: float
    backward: float


class Memory(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are alive, except those of `own`. Memory inside a
    custom operator is not seen.
    """

    def __init__(self, own: list[torch.Tensor]) -> None:
        super().__init__()
        self.own = {tensor.untyped_storage()._cdata for tensor in own}
        self.made: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.peak, self.at_peak = 0, Counter[str]()

    def __torch_dispatch__(self, function, types, args: tuple = (), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name
        if function.is_view or name == "prim::device":
            return out
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.own:
                    what = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                    self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), what))
        if name not in LAUNCH_NOTHING or name.startswith("aten::empty"):
            self._look()
        return out

    def _look(self) -> None:
        now = self.alive()
        if now > self.peak:
            self.peak, self.at_peak = now, Counter()
            for _, size, what in self.made.values():
                self.at_peak[what] += size

    def alive(self) -> int:
        for key in [key for key, (ref, *_) in self.made.items() if ref.expired()]:
            del self.made[key]
        return sum(size for _, size, _ in self.made.values())


class _Arrived:
    """A finished exchange."""

    def wait(self) -> None:
        pass


def exchange_nothing(patch: pytest.MonkeyPatch, tokens_per_rank: int) -> None:
    """Let exchanges between ranks leave their results as they were made, and give every expert the same share."""

    def even(load: torch.Tensor, ranks: RankGroup) -> RowCounts:
        each = tokens_per_rank * ModelConfig().text.num_experts_per_tok // ranks.size
        return RowCounts(torch.empty_like(load), [each] * ranks.size, [each] * ranks.size)

    patch.setattr(model.moe, "exchange_counts", even)
    for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce"):
        patch.setattr(dist, name, lambda *_, **__: _Arrived())


def fake_parameters(built: DeepseekV41) -> None:
    """Replace meta tensors by fake ones, and let every gradient go as soon as it is summed, since the plan counts
    gradients for themselves.
    """
    for name, module in built.named_modules():
        for leaf, tensor in list(module.named_parameters(recurse=False)):
            trained = ".engram.embed" not in f".{name}"
            module._parameters[leaf] = made = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), trained)
            if trained:
                made.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype)
    built.token_map = torch.empty(built.config.text.vocab_size, dtype=torch.int64)


def config_of_rank() -> Config:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return as_planned(parse(compose("train", overrides=open_overrides(LAYOUT))))


def measure(config: Config, patch: pytest.MonkeyPatch) -> tuple[Bytes, Memory]:
    """The memory of the step with Triton kernels, and what was alive at its peak in the backward pass."""
    layout, length = config.parallel, config.task.seq_len
    for module, name in ((model.sparse, "CHUNK_ELEMENTS"), (model.loss, "CHUNK_LOGITS")):
        patch.setattr(module, name, dict.fromkeys(("cpu", "cuda"), getattr(module, name)["cuda"]))
    exchange_nothing(patch, length // layout.context_parallel)
    experts, context = (RankGroup(None, RANK, size) for size in (layout.expert_parallel, layout.context_parallel))
    options = config.runtime.__class__(kernels="triton", recompute=True)
    built = allocate_model(
        ModelConfig.from_dict(config.model), options, None, "meta", torch.float32, Parallel(experts, context=context)
    )
    ids = torch.randint(5, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[length]])}
    batch["layout"] = built.lay_out(**batch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_parameters(built)
        denominators = built.loss_denominators(**batch)
        with Memory([*built.parameters(), *built.buffers()]) as used:
            with torch.autocast("cpu", torch.bfloat16):
                losses = built.losses(**batch, denominators=denominators)
            saved, forward, used.peak = used.alive(), used.peak, 0
            losses.total.backward()
    return Bytes(saved, forward, used.peak), used


def plan(config: Config) -> Bytes:
    """What `train.planning.memory` computes for the same moments."""
    job, tokens = job_of(config), memory.tokens_per_pass(config)
    text = job.model.config.text
    held = sum(memory.context_bytes(config, text, tokens).values()) + tokens * memory.layout_bytes(text)
    held += tokens * memory.candidate_bytes(text, memory.micro_batch_rows(config), config.task.seq_len)
    gradients = memory.entry_gradient_bytes(config, text, tokens)
    held += gradients.pop("gradients of index keys in the losses")
    at_the_loss = memory.at_the_loss(config, job, tokens)
    forward = sum(at_the_loss.values()) + held
    gone = sum(size for name, size in at_the_loss.items() if "logits" in name or "copies" in name)
    backward = max(sum(moment.values()) for moment in memory.block_moments(config, job, tokens)) + held
    backward += sum(gradients.values())
    return Bytes(forward - gone, forward, backward)


def main() -> None:
    config = config_of_rank()
    planned = plan(config)
    with pytest.MonkeyPatch.context() as patch:
        found, used = measure(config, patch)
    print(f"{'GiB':<42}{'on fake tensors':>16}{'task=plan':>11}")
    for name, ours, theirs in zip(
        ("saved for the backward pass", "most in the forward pass, at the loss", "most in the backward pass"),
        found, planned, strict=True,
    ):  # fmt: skip
        print(f"{name:<42}{ours / 2**30:>16.3f}{theirs / 2**30:>11.3f}{theirs / ours - 1:>+8.1%}")
    print("\nalive at the peak of the backward pass, GiB:")
    for what, size in used.at_peak.most_common(15):
        print(f"{size / 2**30:>8.3f}  {what}")


if __name__ == "__main__":
    main()
