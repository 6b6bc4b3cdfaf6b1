"""Loads a model whose weights do not all fit on the device that computes.

All computation runs on one device, the main device. The main device holds the embedding, the head, the vision tower,
the norms, and as many blocks as fit. The weights of the other blocks are stored on further devices, in host memory, or
on disk. A hook of accelerate copies the weights of such a block to the main device before the block runs, and deletes
the copies afterwards. An Engram table is never copied as a whole: only the rows that are looked up are copied.

Weights on disk are stored in memory-mapped files, which the operating system reads when the weights are used. After a
block has run, the memory pages of its files are given back to the operating system. The files are unlinked as soon as
they are mapped, so no file is left behind when the process ends. The weights of a quantised checkpoint are stored
packed (`model/packed.py`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import get_max_memory
from torch import Tensor, nn

from model.backbone import Block, DeepseekV41
from model.build import allocate_model
from model.checkpoint.load import load_pretrained, load_weights, never_packed, parameter_packing, read_token_map
from model.checkpoint.released import is_quantised
from model.config import ForwardOptions, ModelConfig
from model.engram import check_token_map, whole_token_map
from model.packed import PackedWeight, held_bytes

Place = int | str  # where weights are stored: the number of a GPU, "cpu" or "disk"
DISK = "disk"
GIVE_BACK = 0.02  # after each such share of the weights is read, the pages of mapped files are given back


def load_where_it_fits(
    folder: str | Path,
    dtype: torch.dtype,
    max_memory: Mapping[Place, int | str] | None = None,
    offload_folder: str | Path | None = None,
    runtime: ForwardOptions | None = None,
    packed: bool = False,
) -> tuple[DeepseekV41, dict[str, Place]]:
    """Load a checkpoint folder, and store each part of the model in the first place that has room for the part.

    Returns the model, and a dictionary from the name of each model part to the place (GPU number, "cpu" or "disk") that
    stores the part; the entry "" is the place of all parts without an entry of their own. If the main device has room
    for the whole model, this function calls `load_pretrained`; otherwise the returned model is frozen and in evaluation
    mode.

    max_memory: maximum memory to use in each place, as bytes or as text such as "10GiB". The keys are GPU numbers and
        "cpu"; the main device is the GPU with the lowest number, or the CPU if there is no GPU. None: the free memory.
    offload_folder: folder for the weights that fit neither on a GPU nor in host memory.
    packed: keep the weights of a quantised checkpoint packed even if the main device has room for the whole model.

    Raises ValueError if the main device has too little memory for the parts that it must hold, or if some weights must
    be stored on disk and offload_folder is None. Raises OSError if the disk of offload_folder is full. Also raises the
    errors of `load_pretrained`.
    """
    given = get_max_memory(None if max_memory is None else dict(max_memory))
    budgets = {place: int(size) for place, size in given.items() if place != DISK and size}
    main = next(iter(budgets), "cpu")
    if isinstance(main, int) and not torch.cuda.is_available():
        raise ValueError(f'max_memory names GPU {main}, but no GPU can be used here; leave GPUs out: {{"cpu": "8GiB"}}')
    config = ModelConfig.load(folder)
    kinds = parameter_packing if packed and is_quantised(config.to_dict()) else never_packed
    whole = allocate_model(config, runtime, None, "meta", dtype, packing_of=kinds)
    if sum(part_sizes(whole).values()) <= budgets.get(main, 0):
        return load_pretrained(folder, dtype, device_of(main), runtime, packed=packed), {"": main}
    return load_offloaded(folder, dtype, budgets, offload_folder, runtime)


def load_offloaded(
    folder: str | Path,
    dtype: torch.dtype,
    budgets: Mapping[Place, int],
    offload_folder: str | Path | None,
    runtime: ForwardOptions | None = None,
) -> tuple[DeepseekV41, dict[str, Place]]:
    """Load a checkpoint folder like `load_where_it_fits`, but without checking whether the main device has room for the
    whole model; the returned model is always frozen and in evaluation mode.

    budgets: maximum bytes to use in each place; the first place is the main device. The other arguments, the results
    and the errors are those of `load_where_it_fits`. Also raises ValueError for `runtime.decoder_replay`, which is not
    supported with offloaded weights.
    """
    folder = Path(folder)
    config, main = ModelConfig.load(folder), next(iter(budgets), "cpu")
    kinds = parameter_packing if is_quantised(config.to_dict()) else never_packed
    model = allocate_model(config, runtime, None, "meta", dtype, packing_of=kinds)
    if model.runtime.decoder_replay:
        raise ValueError("runtime.decoder_replay is not supported with offloaded weights")
    sizes = part_sizes(model)
    places = choose_places(sizes, budgets)
    if DISK in places.values() and offload_folder is None:
        needed = sum(size for name, size in sizes.items() if places[name] == DISK)
        raise ValueError(
            f"{needed / 2**30:.2f} GiB of the weights fit neither on a device nor in memory (max_memory: "
            f"{_shown(budgets)}); give offload_folder=... on a disk with room for them, or raise max_memory"
        )
    files = _materialise(model, places, main, offload_folder)
    if (token_map := read_token_map(folder, config)) is not None:
        check_token_map(config.text, token_map)
        model.token_map = whole_token_map(config.text, token_map).to(device_of(main))
    _load(model, folder, files)
    for name, place in places.items():
        module = model.get_submodule(name)
        if isinstance(module, Block) and place != main:
            add_hook_to_module(module, _OnDemand(dict(_weights(module)), device_of(main), files))
    return model.eval(), places


def _load(model: DeepseekV41, folder: Path, files: Mapping[int, _File]) -> None:
    """Read the weights of the checkpoint in `folder` into the model. Each time another fraction GIVE_BACK of the
    weights has been read, the memory pages of the mapped `files` are given back to the operating system.
    """
    read = 0.0

    def done(share: float) -> None:
        nonlocal read
        read += share
        if read >= GIVE_BACK:
            read = 0.0
            _give_back(files.values())

    load_weights(model, folder, done=done)
    _give_back(files.values())


def part_sizes(model: DeepseekV41) -> dict[str, int]:
    """Returns the bytes of each part of the model that can be placed separately. A part is a block without its Engram
    table ("layers.<n>"), an Engram table ("layers.<n>.engram.embed"), or the rest of the model ("").
    """
    sizes = {"": 0, **{f"layers.{layer}": 0 for layer in range(len(model.layers))}}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        part = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        if ".engram.embed." in name:
            part += ".engram.embed"
        sizes[part] = sizes.get(part, 0) + held_bytes(tensor)
    return sizes


def choose_places(sizes: Mapping[str, int], budgets: Mapping[Place, int]) -> dict[str, Place]:
    """Choose where to store each part of a model: first the blocks in order, then the Engram tables, each part in the
    first place that has room for it. Engram tables are stored only on the main device, in host memory or on disk.

    sizes: the bytes of each part, as `part_sizes` returns them. budgets: the bytes that may be used in each place; the
    first place is the main device. Returns the place of each part.

    The main device also holds the part "" (everything except blocks and Engram tables). If the main device is a GPU
    without room for all parts, memory for a copy of the largest block is reserved on the main device. Raises ValueError
    if the main device has too little memory for the part "" and this reserve.
    """
    main, *others = budgets
    parts = sorted((name for name in sizes if name), key=lambda name: name.endswith("embed"))  # stable: blocks first
    largest = max(sizes[name] for name in parts if not name.endswith("embed"))
    free = {place: int(budget) for place, budget in budgets.items()}
    free[main] -= sizes[""]
    if sum(sizes[name] for name in parts) > free[main] and device_of(main).type != "cpu":
        free[main] -= largest
    if free[main] < 0:
        needed = budgets[main] - free[main]
        raise ValueError(
            f"max_memory[{main!r}] = {budgets[main] / 2**30:.2f} GiB is too little: the embedding, the head and one "
            f"block need {needed / 2**30:.2f} GiB there"
        )
    places: dict[str, Place] = {"": main}
    for name in parts:
        tiers = [main, *others] if not name.endswith("embed") else [p for p in budgets if p in (main, "cpu")]
        places[name] = next((place for place in tiers if sizes[name] <= free[place]), DISK)
        if places[name] != DISK:
            free[places[name]] -= sizes[name]
    return places


def device_of(place: Place) -> torch.device:
    """Returns the torch device of the tensors that are kept in `place`: a GPU number, a device name or "disk".

    For "disk" the CPU is returned, because weights on disk are mapped into host memory.
    """
    return torch.device("cpu" if place in ("cpu", DISK) else place if isinstance(place, str) else f"cuda:{place}")


@dataclass(frozen=True)
class _File:
    """The memory mapping of the file that holds one tensor."""

    mapping: mmap.mmap

    def give_back(self) -> None:
        """Let the operating system drop the memory pages of the mapped file; the file keeps the written values."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


def _give_back(files: Any) -> None:
    for file in files:
        file.give_back()


def _mapped(like: Tensor, folder: Path) -> tuple[Tensor, _File]:
    """Create a file in `folder`, and a tensor with the shape and dtype of `like` that is stored in this file. Returns
    the tensor and the file. Raises OSError if the disk is full.
    """
    size = max(1, like.numel() * like.element_size())
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal at the first write
        mapping = mmap.mmap(file.fileno(), size)
    values = torch.frombuffer(mapping, dtype=torch.uint8, count=like.numel() * like.element_size())
    return values.view(like.dtype).view(like.shape), _File(mapping)


def _materialise(
    model: DeepseekV41, places: Mapping[str, Place], main: Place, folder: str | Path | None
) -> dict[int, _File]:
    """Replace each meta tensor of a model by an uninitialised real tensor in the place of its part. Returns the mapped
    files of the tensors on disk; the key of a file is the address (`data_ptr()`) of its tensor.
    """
    files: dict[int, _File] = {}
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def real(like: Tensor, place: Place) -> Tensor:
        if place != DISK or not like.numel():
            return torch.empty(like.shape, dtype=like.dtype, device=device_of(place))
        assert folder is not None, "places on disk need a folder"
        tensor, file = _mapped(like, Path(folder))
        files[tensor.data_ptr()] = file
        return tensor

    for name, module in model.named_modules():
        place = places[_part_of(name, places)]
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, PackedWeight):
                codes, scale = real(parameter.codes, place), real(parameter.scale, place)
                made: Tensor = PackedWeight(codes, scale, parameter.packing, parameter.dtype)
            else:
                made = real(parameter, place)
            module._parameters[leaf] = nn.Parameter(made, requires_grad=False)
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device_of(main))
    return files


def _part_of(name: str, places: Mapping[str, Place]) -> str:
    """Returns the name of the part to which the module called `name` belongs: the longest key of `places` that is a
    prefix of `name`.
    """
    return max((part for part in places if part == "" or f"{name}.".startswith(f"{part}.")), key=len)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Returns (name, tensor) pairs of the weights of a block, except those of its Engram table."""
    return ((name, parameter.data) for name, parameter in module.named_parameters() if ".embed." not in f".{name}")


class _OnDemand(ModelHook):
    """A hook that stores the weights of a block outside the block, and copies the weights to `device` while the block
    runs. While the block does not run, its parameters are meta tensors.
    """

    no_grad = False

    def __init__(self, weights: dict[str, Tensor], device: torch.device, files: Mapping[int, _File]):
        self.weights, self.device = weights, device
        self.absent = {name: nn.Parameter(weight.to("meta"), requires_grad=False) for name, weight in weights.items()}
        parts = (part for weight in weights.values() for part in _stored(weight))
        self.files = [files[part.data_ptr()] for part in parts if part.data_ptr() in files]

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._set(module, self.absent)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        found = {name: weight.to(self.device) for name, weight in self.weights.items()}
        self._set(module, {name: nn.Parameter(weight, requires_grad=False) for name, weight in found.items()})
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._set(module, self.absent)
        _give_back(self.files)
        return output

    def _set(self, module: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        for name, weight in weights.items():
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent)._parameters[leaf] = weight


def _stored(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that store a weight: codes and scale of a packed weight, otherwise the weight itself."""
    return (weight.codes, weight.scale) if isinstance(weight, PackedWeight) else (weight,)


def _shown(budgets: Mapping[Place, int]) -> str:
    return ", ".join(f"{place}: {size / 2**30:.2f} GiB" for place, size in budgets.items())
