"""Packs graded responses into rows with the tensors that the RL losses need.

All tensors of a batch are aligned with its labels: the value for a token is at the position of that token. Labels are
-100 at prompt tokens and at response tokens that are too stale to be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.packing import pack_rows
from model.generation import Sample
from train.config.rl import LengthTerm
from train.rl.collect import Group, Response
from train.rl.effort import group_relative_advantages, length_reward
from train.rl.rollout.base import routing_of

IGNORE = -100
INPUTS = ("input_ids", "labels", "seq_lens", "prompt_lens", "routing")  # the inputs of `model.losses`
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the batches: ``seq_len`` tokens in a row, ``rows`` rows in a micro-batch, ``layers`` layers in the
    model, and ``experts_per_token`` experts chosen for a token. ``pad``: the id of the padding token.
    """

    seq_len: int
    rows: int
    pad: int
    layers: int
    experts_per_token: int
    staleness: int  # largest number of policy versions (steps) since a token was written


@dataclass(frozen=True)
class Scored:
    """The responses of a step with their rewards (length penalty included) and advantages, all in the same order."""

    responses: list[Response]
    tasks: Tensor  # int64 [N]
    efforts: Tensor  # int64 [N]
    rewards: Tensor  # fp64 [N]
    advantages: Tensor  # fp64 [N]
    informative: Tensor  # bool [N]: the rewards in the response's group differ
    groups: int
    zero_variance: int  # number of groups whose rewards are all equal, so that they give no gradient


def score(groups: Sequence[Group], length: LengthTerm | None, trained: Sequence[int]) -> Scored:
    """Add the length penalty (if there is one) to the rewards, and compute each response's advantage relative to the
    mean reward of its group.
    """
    responses = [response for group in groups for response in group.responses]
    owner = torch.tensor([n for n, group in enumerate(groups) for _ in group.responses])
    efforts = torch.tensor([group.effort for group in groups for _ in group.responses])
    tasks = torch.tensor([group.task for group in groups for _ in group.responses])
    rewards = torch.tensor([response.outcome.reward for response in responses], dtype=torch.float64)
    if length is not None:
        lengths = torch.tensor([response.length for response in responses])
        rewards = rewards + length_reward(length, lengths, efforts, trained)
    advantages, informative = group_relative_advantages(rewards, owner)
    zero_variance = len(groups) - len(owner[informative].unique())
    return Scored(responses, tasks, efforts, rewards, advantages, informative, len(groups), zero_variance)


def batches(scored: Scored, chosen: Tensor, shape: Shape, version: int) -> tuple[list[Batch], dict[str, int]]:
    """Pack the responses selected by ``chosen`` (bool [N]) into batches.

    Returns the batches, and two counts by name: the number of tokens in all responses, and the number of tokens in the
    chosen responses that are too old to be trained on (stale).
    """
    numbers = chosen.nonzero().flatten().tolist()
    pieces = [_piece(scored.responses[n].sample, float(scored.advantages[n]), shape, version) for n in numbers]
    counts = {
        "response_tokens": sum(len(response.sample.tokens) for response in scored.responses),
        "stale_tokens": sum(len(scored.responses[n].sample.tokens) for n in numbers)
        - sum(int((piece["labels"] != IGNORE).sum()) for piece in pieces),
    }
    if not pieces:
        return [], counts
    rows = pack_rows(np.array([len(piece["labels"]) for piece in pieces]), shape.seq_len)
    lines = [
        [pieces[document] for document in rows.document[rows.offsets[row] : rows.offsets[row + 1]]]
        for row in range(len(rows))
    ]
    return [_batch(lines[at : at + shape.rows], shape) for at in range(0, len(lines), shape.rows)], counts


def add_sums(total: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Add the sums of a micro-batch to the sums of the step.

    The sums stay on the device, so the CPU need not wait for them.
    """
    for name, value in sums.items():
        total[name] = total[name] + value if name in total else value


def empty_batch(shape: Shape) -> Batch:
    """Return a batch of two padding tokens without targets. A process that has fewer batches than the others adds
    batches of this kind, because all processes must run the model the same number of times.
    """
    return _batch([[{**_blank((2,), shape), "prompt_len": torch.tensor(0)}]], shape)


def _blank(places: tuple[int, ...], shape: Shape) -> Batch:
    """Return the tensors of a batch that contains only padding; ``places`` is the shape of its token ids."""
    return {
        "input_ids": torch.full(places, shape.pad),
        "labels": torch.full(places, IGNORE),
        "old_log_probs": torch.zeros(places),
        "advantage": torch.zeros(places),
        "response": torch.zeros(places, dtype=torch.int64),
        "routing": torch.full((*places, shape.layers, shape.experts_per_token), -1, dtype=torch.int16),
    }


def _piece(sample: Sample, advantage: float, shape: Shape, version: int) -> Batch:
    """Return the tensors of one response together with its prompt, not padded."""
    ids, start = torch.tensor([*sample.request.prompt, *sample.tokens]), len(sample.request.prompt)
    piece = _blank((len(ids),), shape)
    fresh = torch.tensor(sample.versions) >= version - shape.staleness
    piece["input_ids"] = ids
    piece["labels"][start:] = ids[start:].masked_fill(~fresh, IGNORE)
    piece["old_log_probs"][start:] = torch.tensor(sample.log_probs)
    piece["advantage"][start:] = advantage
    piece["routing"] = routing_of(sample, shape.layers, shape.experts_per_token)
    piece["prompt_len"] = torch.tensor(start)  # cannot be computed from labels, which are -100 at stale tokens too
    return piece


def _batch(lines: list[list[Batch]], shape: Shape) -> Batch:
    """Join the tensors of the responses in each row (the result of ``_piece``) into a batch [rows, seq_len], in which
    the responses are numbered consecutively.
    """
    batch = _blank((len(lines), shape.seq_len), shape)
    lengths = torch.zeros(len(lines), max(map(len, lines)), dtype=torch.int64)
    prompts, number = torch.zeros_like(lengths), 0
    for row, pieces in enumerate(lines):
        at = 0
        for column, piece in enumerate(pieces):
            size = len(piece["labels"])
            for name in batch:
                batch[name][row, at : at + size] = piece[name]
            batch["response"][row, at : at + size] = number
            lengths[row, column], prompts[row, column] = size, piece["prompt_len"]
            number, at = number + 1, at + size
    return {**batch, "seq_lens": lengths, "prompt_lens": prompts}
