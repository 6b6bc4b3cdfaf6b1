"""The sequence layout: a batch flattened to its T non-padding tokens, with index tensors that say where documents and
compressed entries begin.

Every layer works on [T, ...] tensors, and only this file deals with rows, padding and document boundaries. Each row of
a batch is one document, or several documents if `seq_lens` gives their lengths. Padding is removed at the input and
restored at the output. A packed batch therefore gives the same results as its documents run separately, and documents
need no alignment.

In shapes, T is the number of tokens in the layout and N the number of entry slots of one compression ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from model.config import TextConfig
from model.parallel.context import GatherPlan, HaloPlan
from model.parallel.ranks import RankGroup
from model.rope import inverse_frequencies, rotations


@dataclass(frozen=True)
class Entries:
    """The compressed entries of one compression ratio r, in the order of their slots (indices in the tensor of all
    entries).

    The floor(len/r) entries of a document fill consecutive slots. The slots of each document start at a multiple of
    `candidate_block_size`, so a block of the hierarchical indexer is `slot // block_size`, and the entries that a query
    sees are always one range of slots.

    Under context parallelism (see `Chunk`), slots number the entries of all ranks, but `members` and `phasors` list
    only the slots that this rank computes (those whose last token is in its chunk), padded to `gathered.capacity` rows.
    """

    ratio: int
    slots: int
    members: (
        Tensor  # int64 [N, r]: indices of the tokens in each slot's group (arbitrary valid indices in unused slots)
    )
    phasors: Tensor  # fp32 [N, rope/2, 2]: rotation at position j*r
    visible_from: Tensor  # int64 [T]: first slot of the query's document
    visible_to: Tensor  # int64 [T]: one past the newest visible slot; equal to visible_from if the query sees no entry
    # Copies of visible_from and visible_to on the CPU, to plan chunks without synchronising with the device
    host_from: np.ndarray
    host_to: np.ndarray
    own: int | None = (
        None  # slots per query if each query has its own range of slots; query t's range begins at slot t*own
    )
    halo: HaloPlan | None = None  # for a chunk: rows of earlier tokens whose compression group ends in the chunk
    gathered: GatherPlan | None = None  # for a chunk: how many slots each rank computes

    def __post_init__(self) -> None:
        """Raise ValueError if there are too many slots for int32 slot indices."""
        if self.slots >= 2**31:
            raise ValueError(
                f"the batch has {self.slots:,} entry slots with compression ratio {self.ratio}, but slots are numbered "
                f"in int32, below {2**31:,}; use fewer or shorter sequences in a batch"
            )


@dataclass(frozen=True)
class Chunk:
    """The tokens of a micro-batch that this rank computes under context parallelism, and the data that it needs from
    other ranks.

    The ranks of a group hold consecutive chunks of the same tokens.
    """

    ranks: RankGroup
    window: HaloPlan  # earlier tokens that the sliding windows of the chunk's queries reach
    lookback: Tensor  # int64 [b]: positions in [B*S] of the b earlier tokens that Engram's n-grams reach
    lookback_image: Tensor | None  # bool [b]: whether these tokens belong to an image span; None without images
    feature_slots: tuple[int, int, int]  # number of image features before the chunk, in it, and in total


@dataclass(frozen=True)
class SequenceLayout:
    """The layout of the tokens of one micro-batch. It is immutable, built once and read by every layer.

    With a `chunk`, T is the number of this rank's tokens, and token index 0 is the first of this rank's tokens
    (negative indices are earlier tokens). Chunks do not change the numbers of documents and slots, so
    `document_lengths` covers all documents.
    """

    rows: int
    row_length: int
    gather: Tensor | None  # int64 [T]: position of each token in the flattened [B*S]; None if there is no padding
    document: Tensor  # int64 [T]: number of the token's document in the batch
    document_start: Tensor  # int64 [T]: token index of the first token of the token's document
    document_lengths: Tensor  # int64 [documents]
    window_start: Tensor  # int64 [T]: token index of the first token in the query's sliding window
    decoder_window_start: Tensor  # as window_start, but for decoder layers
    position: Tensor  # int64 [T]: position in the document
    image: Tensor | None  # bool [T]: whether the token belongs to an image span; None if the batch has no image
    phasors: Tensor  # fp32 [T, rope/2, 2] of window-only layers
    phasors_yarn: Tensor  # fp32 [T, rope/2, 2] of compressed layers
    entries: dict[int, Entries]  # by compression ratio
    chunk: Chunk | None = None  # None: this rank computes all tokens
    supervised: Tensor | None = None  # int64 [R]: indices of the tokens with a target; None if no labels were given

    @property
    def tokens(self) -> int:
        return self.position.shape[0]

    def to(self, device: torch.device) -> SequenceLayout:
        """The layout with all tensors moved to `device`; the host does not wait for copies from pinned memory."""
        return _with_tensors(self, lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> SequenceLayout:
        """A copy of the layout in pinned memory, from which a GPU can copy without making the host wait."""
        return _with_tensors(self, Tensor.pin_memory)

    def flatten(self, x: Tensor) -> Tensor:
        """Flatten [B, S, ...] to the non-padding tokens [T, ...]."""
        flat = x.reshape(self.rows * self.row_length, *x.shape[2:])
        return flat if self.gather is None else flat.index_select(0, self.gather)

    def flatten_with_lookback(self, x: Tensor) -> Tensor:
        """As `flatten`, but the result [b + T, ...] begins with the rows of the b tokens before the chunk, because
        Engram's n-grams at the start of the chunk include these tokens.
        """
        if self.chunk is None:
            return self.flatten(x)
        flat = x.reshape(self.rows * self.row_length, *x.shape[2:])
        return torch.cat([flat.index_select(0, self.chunk.lookback), self.flatten(x)])

    def image_with_lookback(self) -> Tensor | None:
        """Whether each token in the result of `flatten_with_lookback` belongs to an image, bool [b + T]; None without
        images.
        """
        if self.image is None or self.chunk is None or self.chunk.lookback_image is None:
            return self.image
        return torch.cat([self.chunk.lookback_image, self.image])

    def targets(self, labels: Tensor) -> Tensor:
        """The target int64 [T] of each token, from unshifted labels int64 [B, S]: the label of the next token, or -100
        at the end of a document. The next token may be in the next chunk.
        """
        flat = labels.reshape(-1)
        place = torch.arange(self.tokens, device=flat.device) if self.gather is None else self.gather
        following = flat.index_select(0, (place + 1).clamp(max=len(flat) - 1))
        return following.masked_fill(self.position + 1 == self.document_lengths[self.document], -100)

    def unflatten(self, x: Tensor) -> Tensor:
        """Turn [T, ...] into [B, S, ...]; padding positions and positions of other ranks' chunks are zero."""
        if self.gather is not None:
            full = x.new_zeros(self.rows * self.row_length, *x.shape[1:])
            x = full.index_copy(0, self.gather, x)
        return x.reshape(self.rows, self.row_length, *x.shape[1:])


Placed = TypeVar("Placed", bound=Entries | Chunk | SequenceLayout | HaloPlan)


def _with_tensors(value: Placed, change: Callable[[Tensor], Tensor]) -> Placed:
    """A copy of `value` in which each tensor x is replaced by `change(x)`, also in nested values."""
    changed: dict[str, Any] = {}
    for field in fields(value):
        held = getattr(value, field.name)
        if isinstance(held, Tensor):
            changed[field.name] = change(held)
        elif isinstance(held, Entries | Chunk | HaloPlan):
            changed[field.name] = _with_tensors(held, change)
        elif isinstance(held, dict):
            changed[field.name] = {key: _with_tensors(one, change) for key, one in held.items()}
    return replace(value, **changed)


def build_layout(
    config: TextConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    seq_lens: Tensor | None = None,
    vision_token_types: Tensor | None = None,
    replay_start: Tensor | None = None,
) -> SequenceLayout:
    """Compute the layout of a batch. `input_ids` is int64 [B, S]. At most one of two arguments gives the documents:
    `attention_mask` [B, S] (1 for a token, 0 for padding, contiguous in each row) or `seq_lens` [B, documents]
    (lengths; 0 means no document). `replay_start` int64 [B, documents] (one per row without `seq_lens`) is the position
    where simulated bounded replay begins, see `bound_windows`. The layout is computed on the CPU and moved to the
    device of `input_ids`; no GPU synchronisation is needed if the batch is still on the CPU. Raises ValueError if the
    arguments are malformed.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be [rows, positions] and not empty, got {list(input_ids.shape)}")
    if vision_token_types is not None and vision_token_types.shape != input_ids.shape:
        raise ValueError(
            f"vision_token_types must be {list(input_ids.shape)} as input_ids, got {list(vision_token_types.shape)}"
        )
    rows, row_length = input_ids.shape
    starts, lengths = _documents(rows, row_length, attention_mask, seq_lens)
    length = torch.tensor(lengths)
    token_start = length.cumsum(0) - length  # token index of each document's first token
    document = torch.repeat_interleave(torch.arange(len(lengths)), length)
    position = torch.arange(int(length.sum())) - token_start[document]
    gather = torch.tensor(starts)[document] + position
    full = len(gather) == rows * row_length
    ratios = sorted({r for r in config.compress_ratios[: config.num_hidden_layers] if r})
    yarn = inverse_frequencies(config, compressed=True)
    image = None
    if vision_token_types is not None:
        image = vision_token_types.cpu().reshape(-1)[gather] >= 0
    document_start = token_start[document]
    window_start = torch.maximum(document_start, torch.arange(len(document)) - (config.sliding_window - 1))
    if replay_start is not None:
        replays = _replays(replay_start, rows, seq_lens, length)
        window_start = bound_windows(window_start, position, document_start, replays[document])
    return SequenceLayout(
        rows=rows,
        row_length=row_length,
        gather=None if full else gather,
        document=document,
        document_start=document_start,
        document_lengths=length,
        window_start=window_start,
        decoder_window_start=window_start,
        position=position,
        image=image,
        phasors=rotations(position, inverse_frequencies(config, compressed=False)),
        phasors_yarn=rotations(position, yarn),
        entries={
            r: _entries(r, config.candidate_block_size, length, token_start, document, position, yarn) for r in ratios
        },
    ).to(input_ids.device)


def bound_windows(window_start: Tensor, position: Tensor, document_start: Tensor, replay_start: Tensor) -> Tensor:
    """Bound sliding windows as in SWA bounded replay (V4.1 report): with replay start s, query i >= s sees the window
    keys [max(s, i-W+1), i].

    All tensors are int64 [T]. s counts from the beginning of the query's document; s = 0 changes nothing.
    """
    bounded = torch.maximum(window_start, document_start + replay_start)
    return torch.where(position >= replay_start, bounded, window_start)


def prompt_lengths(layout: SequenceLayout, labels: Tensor) -> Tensor:
    """The prompt length of each document, int64 [documents]: the number of tokens before the first supervised token, or
    0 if no token is supervised. labels int64 [T] are not shifted.
    """
    first = torch.where((labels >= 0) & (layout.position > 0), layout.position, layout.tokens)
    lengths = torch.full_like(layout.document_lengths, layout.tokens).scatter_reduce(0, layout.document, first, "amin")
    return torch.where(lengths == layout.tokens, 0, lengths)


def _replays(replay_start: Tensor, rows: int, seq_lens: Tensor | None, length: Tensor) -> Tensor:
    """The replay starts int64 [documents] of all documents, without the entries of `replay_start` [B, documents] for
    absent documents. Raises ValueError for a wrong shape or a value outside its document.
    """
    wanted = (rows, 1) if seq_lens is None else tuple(seq_lens.shape)
    if tuple(replay_start.shape) != wanted:
        raise ValueError(f"replay_start must be {list(wanted)}, one for each document, got {list(replay_start.shape)}")
    replays = replay_start.cpu().flatten() if seq_lens is None else replay_start.cpu()[seq_lens.cpu() > 0]
    wrong = ((replays < 0) | (replays >= length)).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"replay_start is {int(replays[at])} in a document of {int(length[at])} tokens")
    return replays


def _entries(ratio, block, length, token_start, document, position, yarn) -> Entries:
    count = length // ratio
    room = (count + block - 1) // block * block  # slots of each document, whole blocks
    if not room.any():
        room[0] = block  # a block of unused slots, so that no tensor is empty
    slot_start = room.cumsum(0) - room
    owner = torch.repeat_interleave(torch.arange(len(length)), room)
    index = torch.arange(int(room.sum())) - slot_start[owner]  # j, the number of the entry in its document
    last = (count[owner] - 1).clamp(min=0)
    first_token = token_start[owner] + index.minimum(last) * ratio
    members = first_token[:, None] + torch.arange(ratio)
    visible_from = slot_start[document]
    visible_to = visible_from + (position + 1) // ratio
    return Entries(
        ratio=ratio,
        slots=len(index),
        members=members.clamp(max=len(document) - 1),  # only in unused slots can indices point past the end
        phasors=rotations(index * ratio, yarn),
        visible_from=visible_from,
        visible_to=visible_to,
        host_from=visible_from.numpy(),
        host_to=visible_to.numpy(),
    )


def _documents(rows: int, row_length: int, attention_mask: Tensor | None, seq_lens: Tensor | None):
    """The start position in the flattened [B*S] batch, and the length, of every document in order."""
    if attention_mask is not None and seq_lens is not None:
        raise ValueError("give either attention_mask or seq_lens, not both; seq_lens already determines the padding")
    starts: list[int] = []
    lengths: list[int] = []
    if seq_lens is not None:
        if seq_lens.dim() != 2 or seq_lens.shape[0] != rows:
            raise ValueError(f"seq_lens must be [{rows}, documents], got {list(seq_lens.shape)}")
        for row, lens in enumerate(seq_lens.tolist()):
            if min(lens, default=0) < 0 or sum(lens) > row_length:
                raise ValueError(
                    f"seq_lens row {row} is {lens}: lengths must be >= 0 and add up to at most {row_length}"
                )
            at = row * row_length
            for n in filter(None, lens):
                starts.append(at)
                lengths.append(n)
                at += n
    elif attention_mask is not None:
        if tuple(attention_mask.shape) != (rows, row_length):
            raise ValueError(f"attention_mask must be [{rows}, {row_length}], got {list(attention_mask.shape)}")
        for row, mask in enumerate(attention_mask.bool().cpu()):
            real = mask.nonzero().flatten()
            if len(real) and int(real[-1]) - int(real[0]) + 1 != len(real):
                raise ValueError(
                    f"attention_mask row {row} has zeros between ones; its ones must be contiguous (use seq_lens for "
                    "packed documents)"
                )
            if len(real):
                starts.append(row * row_length + int(real[0]))
                lengths.append(len(real))
    else:
        starts = [row * row_length for row in range(rows)]
        lengths = [row_length] * rows
    if not lengths:
        raise ValueError("the batch has only padding and no token")
    return starts, lengths
