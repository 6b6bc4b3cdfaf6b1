"""Frozen weights that are kept in memory in their quantised form (codes and scales), and unpacked whenever they are
used.

A `PackedWeight` replaces a parameter of a quantised checkpoint (released.py defines the packing of each weight). It has
the shape and dtype of the unpacked values, so that `nn.Linear`, adapters of `peft`, autocast and activation
checkpointing work as with plain weights. A matrix product unpacks the matrix in the forward pass and again in the
backward pass, and autograd saves only the packed form. An embedding look-up unpacks only the rows that it reads. The
unpacked values are bit for bit the same as in an unpacked checkpoint, and so are losses and the gradients of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from model.quantize import Packing, unpack

aten = torch.ops.aten


class PackedWeight(Tensor):
    """A frozen weight [rows, columns], or a stack [experts, rows, columns] of weights, in the form of codes and scales.

    codes, scale: in the format of `Packing`; for a stack, the first axis is the experts. dtype: the dtype of the
    unpacked values, fp32 or bf16 (both represent them exactly). A transposed matrix has the same codes and scales, with
    `transposed` set. on_host: whether the weight stays in host memory when its model is moved to a device; only the
    rows that are looked up are then copied to the device.
    """

    codes: Tensor
    scale: Tensor
    packing: Packing
    transposed: bool
    on_host: bool

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        packing: Packing,
        dtype: torch.dtype,
        transposed: bool = False,
        on_host: bool = False,
    ) -> PackedWeight:
        shape = list(codes.shape)
        if packing.codes == torch.int8:
            shape[-1] *= 2
        if transposed:
            shape[-2:] = shape[:-3:-1]
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)
        self.codes, self.scale, self.packing, self.transposed = codes, scale, packing, transposed
        self.on_host = on_host
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "FP4" if self.packing.codes == torch.int8 else "FP8"
        return f"PackedWeight({kind}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.packing, self.dtype, self.transposed, self.on_host)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> PackedWeight:
        packing, dtype, transposed, on_host = meta
        return cls(inner["codes"], inner["scale"], packing, dtype, transposed, on_host)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Returns the weight itself, because frozen weights are shared between copies of a model."""
        return self

    @property
    def packed_bytes(self) -> int:
        """The number of bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def values(self) -> Tensor:
        """The unpacked weight."""
        if self.codes.dim() == 3:
            return torch.stack([self.of_expert(expert) for expert in range(len(self.codes))])
        found = unpack(self.codes, self.scale, self.packing).to(self.dtype).contiguous()
        return found.t() if self.transposed else found

    def of_expert(self, expert: int) -> Tensor:
        """The unpacked matrix [rows, columns] of one expert of a stack."""
        return unpack(self.codes[expert], self.scale[expert], self.packing).to(self.dtype).contiguous()

    def rows(self, index: Tensor) -> Tensor:
        """The unpacked rows selected by int64 `index` (any shape): [*index.shape, columns]."""
        if self.transposed or self.codes.dim() != 2 or self.packing.tile_rows != 1:
            return self.values()[index]
        found = self.packed_rows(index.flatten()).values()
        return found if index.dim() == 1 else found.unflatten(0, index.shape)

    def packed_rows(self, index: Tensor) -> PackedWeight:
        """The rows selected by int64 `index` [N], still packed, on the device of `index`. The weight is a matrix with
        scales for each row.
        """
        here = index.to(self.codes.device)
        codes, scale = (part.index_select(0, here).to(index.device) for part in (self.codes, self.scale))
        return self._like(codes=codes, scale=scale, on_host=False)

    def _like(self, **changes: Any) -> PackedWeight:
        given: dict[str, Any] = {
            "codes": self.codes,
            "scale": self.scale,
            "dtype": self.dtype,
            "transposed": self.transposed,
            "on_host": self.on_host,
        }
        given.update(changes)
        return PackedWeight(packing=self.packing, **given)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], PackedWeight):
            return handler(*args, **kwargs)
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
            raise RuntimeError(
                f"{func} would change a frozen weight that is kept packed. Merge an adapter into its base with "
                "`python -m train task=convert src=BASE adapter=ADAPTER dst=NEW_FOLDER format=released`, or load the "
                "weights unpacked (runtime.frozen=values, load_pretrained(..., packed=False))"
            )
        plain = pytree.tree_map_only(PackedWeight, PackedWeight.values, (args, kwargs))
        return func(*plain[0], **plain[1])


def _to_copy(weight: PackedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    dtype = dtype or weight.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return weight.values().to(device=device, dtype=dtype)
    if device is None or weight.on_host:
        return weight._like(dtype=dtype)
    return weight._like(codes=weight.codes.to(device), scale=weight.scale.to(device), dtype=dtype)


def _transpose(weight: PackedWeight, first: int = 0, second: int = 1) -> Tensor:
    if weight.dim() == 2 and {first % 2, second % 2} == {0, 1}:
        return weight._like(transposed=not weight.transposed)
    return weight.values().transpose(first, second)


def _embedding(weight: PackedWeight, index: Tensor, *_: Any, **__: Any) -> Tensor:
    return weight.rows(index)


def _index_select(weight: PackedWeight, dim: int, index: Tensor) -> Tensor:
    return weight.rows(index) if dim == 0 and weight.dim() == 2 else weight.values().index_select(dim, index)


def _slice(
    weight: PackedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A slice of a packed weight: a range of rows that starts at the edge of a tile stays packed; other slices are
    unpacked.
    """
    rows, height = slice(start, end, step).indices(weight.shape[dim]), weight.packing.tile_rows
    first, stop, _ = rows
    if weight.dim() != 2 or dim or step != 1 or weight.transposed or first % height:
        return weight.values()[(slice(None),) * dim + (slice(start, end, step),)]
    return weight._like(codes=weight.codes[first:stop], scale=weight.scale[first // height : -(-stop // height)])


def _new_empty(weight: PackedWeight, size: list[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return torch.empty(size, dtype=dtype or weight.dtype, device=device or weight.device)


def _select(weight: PackedWeight, dim: int, index: int) -> Tensor:
    """The packed weight of one expert of a packed stack; for other selections, the selected unpacked values."""
    if weight.dim() == 3 and dim == 0:
        return weight._like(codes=weight.codes[index], scale=weight.scale[index])
    return weight.values().select(dim, index)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda weight: weight._like(),
    aten.alias.default: lambda weight: weight._like(),
    aten.clone.default: lambda weight, **_: weight._like(),
    aten._to_copy.default: _to_copy,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.new_empty.default: _new_empty,
}


def frozen(codes: Tensor, scale: Tensor, packing: Packing, dtype: torch.dtype) -> torch.nn.Parameter:
    """Make a parameter from codes and scales that stays packed in memory and is never trained."""
    return torch.nn.Parameter(PackedWeight(codes, scale, packing, dtype), requires_grad=False)


def reserved_on_host(shape: torch.Size, packing: Packing, dtype: torch.dtype) -> nn.Parameter:
    """A packed weight that will stay in host memory. It takes no memory until `load_weights` maps the files into it."""
    codes = torch.empty((), dtype=packing.codes).expand(packing.codes_shape(*shape))
    scale = torch.empty((), dtype=torch.float8_e8m0fnu).expand(packing.scale_shape(*shape))
    return nn.Parameter(PackedWeight(codes, scale, packing, dtype, on_host=True), requires_grad=False)


def empty_packed(shape: torch.Size, packing: Packing, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Allocate a packed weight, or a stack of packed weights, whose unpacked values have the given shape."""
    *stack, rows, columns = shape
    codes = torch.empty(*stack, *packing.codes_shape(rows, columns), dtype=packing.codes, device=device)
    scale = torch.empty(*stack, *packing.scale_shape(rows, columns), dtype=torch.float8_e8m0fnu, device=device)
    return frozen(codes, scale, packing, dtype)


@contextmanager
def packed_weights_aside(model: nn.Module) -> Iterator[None]:
    """A context manager that removes the packed weights from `model` during its body, for code that writes to all
    parameters.
    """
    found = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, PackedWeight)
    ]
    for module, name, _ in found:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter


def held_bytes(tensor: Tensor) -> int:
    """The number of bytes that a packed or plain weight occupies on its device. For a weight that stays on the host,
    the number is 0, because its memory pages belong to the file cache of the operating system, which can drop the
    pages.
    """
    if isinstance(tensor, PackedWeight):
        return 0 if tensor.on_host else tensor.packed_bytes
    return tensor.numel() * tensor.element_size()


def holds_packed(model: nn.Module) -> bool:
    """Whether at least one weight of the model is kept packed."""
    return any(isinstance(parameter, PackedWeight) for parameter in model.parameters())


def packed_grouped_linear(rows: Tensor, weight: PackedWeight, ends: Tensor) -> Tensor:
    """`model.moe.grouped_linear` for a packed stack of experts, which unpacks the matrix of one expert at a time."""
    return _GroupedLinear.apply(rows, weight, ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: PackedWeight, ends: Tensor) -> Tensor:
        ctx.weight, ctx.sizes = weight, ends.diff(prepend=ends.new_zeros(1)).tolist()
        out = rows.new_empty(len(rows), weight.shape[1])
        for expert, (part, result) in enumerate(zip(rows.split(ctx.sizes), out.split(ctx.sizes), strict=True)):
            if len(part):
                torch.mm(part, weight.of_expert(expert).t(), out=result)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous()
        out = grad.new_empty(len(grad), ctx.weight.shape[2])
        for expert, (part, result) in enumerate(zip(grad.split(ctx.sizes), out.split(ctx.sizes), strict=True)):
            if len(part):
                torch.mm(part, ctx.weight.of_expert(expert), out=result)
        return out, None, None


def packed_block_linear(x: Tensor, weight: PackedWeight, groups: int) -> Tensor:
    """`model.attention.GroupedLinear` for a packed weight: maps x [T, groups, in] to [T, groups, out]."""
    return _BlockLinear.apply(x, weight, groups)


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight, groups: int) -> Tensor:
        ctx.weight, ctx.groups = weight, groups
        return torch.einsum("tgi,goi->tgo", x, weight.values().unflatten(0, (groups, -1)).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        blocks = ctx.weight.values().unflatten(0, (ctx.groups, -1)).to(grad.dtype)
        return torch.einsum("tgo,goi->tgi", grad, blocks), None, None
