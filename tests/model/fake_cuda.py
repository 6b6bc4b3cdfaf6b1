"""Runs the forward pass of a model on fake CUDA tensors, in a process of its own: `python -m tests.model.fake_cuda`.

On fake tensors nothing is computed and no CUDA is needed, but an operation on tensors of two devices raises, and so
does reading a value. A CPU build of PyTorch can do this only without autograd and autocast, and not through those
methods of tensors that ask for the current device; these are replaced by the operations that they call.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from model import DeepseekV41, ForwardOptions, ModelConfig
from model.build import allocate_model
from tests.model.tiny import raw_config, tokens

aten = torch.ops.aten


def get_item(x: Tensor, key: Any) -> Tensor:
    keys, at, indices = list(key) if isinstance(key, tuple) else [key], 0, []
    for place, one in enumerate(keys):
        if one is Ellipsis:
            keys[place : place + 1] = [slice(None)] * (x.dim() - sum(k is not None for k in keys) + 1)
            break
    for one in keys:
        if one is None:
            x = aten.unsqueeze(x, at)
        elif isinstance(one, slice):
            x = aten.slice(x, at, one.start, one.stop, one.step or 1)
        elif isinstance(one, Tensor):
            indices += [None] * (at - len(indices)) + [one]
        else:
            x = aten.select(x, at, int(one))
            continue
        at += 1
    return aten.index(x, indices) if indices else x


def set_item(x: Tensor, key: Any, value: Any) -> None:
    value = value if isinstance(value, Tensor) else x.new_full((), value)
    if isinstance(key, Tensor):
        aten.index_put_(x, [key], value)
    else:
        aten.copy_(get_item(x, key), value)


def contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return x if x.is_contiguous(memory_format=memory_format) else aten.clone(x, memory_format=memory_format)


def without_the_current_device() -> None:
    Tensor.__getitem__, Tensor.__setitem__ = get_item, set_item
    Tensor.__invert__ = lambda x: aten.bitwise_not(x)
    Tensor.copy_ = lambda x, y, non_blocking=False: aten.copy_(x, y, non_blocking)
    Tensor.contiguous = contiguous


def on_cuda(value: Any) -> Any:
    """The same with fake CUDA tensors in place of its tensors."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if isinstance(value, dict):
        return {key: on_cuda(one) for key, one in value.items()}
    if is_dataclass(value):
        return replace(value, **{field.name: on_cuda(getattr(value, field.name)) for field in fields(value)})
    return value


def move(model: DeepseekV41) -> None:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    like = on_cuda(tensor)
                    held[name] = torch.nn.Parameter(like) if held is module._parameters else like


def forward(kernels: str) -> Tensor:
    """The training loss and the logits of a model with all kinds of layers and Engram, in bf16."""
    config = ModelConfig.from_dict(raw_config(engram=True))
    runtime = ForwardOptions(kernels=kernels)
    token_map = torch.arange(config.text.vocab_size) % 50
    model = allocate_model(config, runtime, token_map, "cpu", torch.bfloat16)
    ids = tokens(2, 21)
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[9, 12], [1, 18]])}
    layout = model.lay_out(**batch)
    with FakeTensorMode(), torch.no_grad():
        move(model)
        batch = {**on_cuda(batch), "layout": on_cuda(layout)}
        losses = model.losses(**batch, denominators=model.loss_denominators(**batch))
        assert_raises_where_it_must(losses.total)
        return losses.total


def assert_raises_where_it_must(on_device: Tensor) -> None:
    for wrong, error in (
        (lambda: on_device + torch.zeros(2), RuntimeError),  # a tensor on the CPU
        (lambda: on_device.item(), DataDependentOutputException),
        (lambda: bool(on_device > 0), DataDependentOutputException),
    ):
        try:
            wrong()
        except error:
            continue
        raise AssertionError("fake tensors have let something pass that a GPU forbids")


def main() -> None:
    without_the_current_device()
    for kernels in ("plain", "triton"):
        total = forward(kernels)
        assert total.is_cuda and total.shape == (), total
        print(f"kernels={kernels}: {total}")


if __name__ == "__main__":
    main()
