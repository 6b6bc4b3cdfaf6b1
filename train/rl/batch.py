"""Graded groups -> packed rows with the inputs of the objective, and the numbers of a step.

All tensors of a batch are aligned with its labels: a token's value is at the token's position. Labels are -100 at
prompts and at response tokens that are too stale to be trained on.
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
    """Of the batches: tokens in a row, rows in a forward pass, and what the model and the objective require."""

    seq_len: int
    rows: int
    pad: int
    layers: int
    experts_per_token: int
    staleness: int  # how many versions a token may be behind the policy


@dataclass(frozen=True)
class Scored:
    """The responses of a step in one order: rewards with the length term, advantages, and which are trained on."""

    responses: list[Response]
    tasks: Tensor  # int64 [N]
    efforts: Tensor  # int64 [N]
    rewards: Tensor  # fp64 [N]
    advantages: Tensor  # fp64 [N]
    informative: Tensor  # bool [N]
    groups: int
    zero_variance: int  # groups in which all rewards are equal: they teach nothing


def score(groups: Sequence[Group], length: LengthTerm | None, trained: Sequence[int]) -> Scored:
    """Rewards with the length term (if there is one), mean-centred in every group."""
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
    """(packed batches of the chosen responses, bool [N]; counts: tokens of all responses, and how many of the chosen
    ones' tokens are stale).
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
    """Add the sums of a micro-batch to those of the step. They stay on the device, so nothing waits for it."""
    for name, value in sums.items():
        total[name] = total[name] + value if name in total else value


def empty_batch(shape: Shape) -> Batch:
    """A batch without targets, for a process that has fewer batches than the others: two tokens of padding."""
    return _batch([[{**_blank((2,), shape), "prompt_len": torch.tensor(0)}]], shape)


def _blank(places: tuple[int, ...], shape: Shape) -> Batch:
    """The tensors of a batch without responses."""
    return {
        "input_ids": torch.full(places, shape.pad),
        "labels": torch.full(places, IGNORE),
        "old_log_probs": torch.zeros(places),
        "advantage": torch.zeros(places),
        "response": torch.zeros(places, dtype=torch.int64),
        "routing": torch.full((*places, shape.layers, shape.experts_per_token), -1, dtype=torch.int16),
    }


def _piece(sample: Sample, advantage: float, shape: Shape, version: int) -> Batch:
    """One response with its prompt."""
    ids, start = torch.tensor([*sample.request.prompt, *sample.tokens]), len(sample.request.prompt)
    piece = _blank((len(ids),), shape)
    fresh = torch.tensor(sample.versions) >= version - shape.staleness
    piece["input_ids"] = ids
    piece["labels"][start:] = ids[start:].masked_fill(~fresh, IGNORE)
    piece["old_log_probs"][start:] = torch.tensor(sample.log_probs)
    piece["advantage"][start:] = advantage
    piece["routing"] = routing_of(sample, shape.layers, shape.experts_per_token)
    piece["prompt_len"] = torch.tensor(start)  # labels do not show it where the first tokens are stale
    return piece


def _batch(lines: list[list[Batch]], shape: Shape) -> Batch:
    """Rows [rows, seq_len] of pieces; their responses are numbered consecutively."""
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
