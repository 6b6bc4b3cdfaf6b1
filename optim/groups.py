"""Sorts parameters into optimizer groups by rules on their names, and prints a table of each parameter's settings.

`assign` takes a list of `Rule`s; the first rule whose pattern matches a parameter's whole name decides how it is
trained. A parameter that no rule matches is an error, and so is a rule that matches no parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import nn

Method = Literal["muon", "sinkhorn", "adamw"]
Blocks = tuple[tuple[int, int], ...]
METHODS = ("muon", "sinkhorn", "adamw")
MAIN = "main"  # the schedule of every group that uses the base learning rate unchanged


@dataclass(frozen=True)
class Rule:
    """The optimizer method and settings of all parameters whose name matches a pattern.

    Attributes:
        pattern: regular expression that must match the parameter's whole name (`re.fullmatch`).
        method: "muon" (2-D or 3-D weights), "sinkhorn" (2-D tables) or "adamw" (anything).
        blocks: only for Muon and 2-D weights: how the rows are split into separately orthogonalised matrices, from the
            top, as (count, rows) pairs; `((64, 512),)` is 64 heads of 512 rows. None means the whole matrix. A 3-D
            weight [E, m, n] is always treated as E matrices.
        lr_factor: constant factor of the learning rate.
        weight_decay: decoupled weight decay; a step multiplies the weight by 1 - lr * weight_decay.
        schedule: name of the time-dependent factor of the group's learning rate (see `Optimizer.set_lr`); for "main"
            the factor is always 1.
        optional: whether the rule may match no parameter at all; otherwise that is an error.
    """

    pattern: str
    method: Method
    blocks: Blocks | None = None
    lr_factor: float = 1.0
    weight_decay: float = 0.0
    schedule: str = MAIN
    optional: bool = False


@dataclass
class Group:
    """A group of parameters with the same optimizer method and settings. The lists `names`, `params` and `blocks` have
    one item for each parameter.
    """

    method: Method
    lr_factor: float
    weight_decay: float
    schedule: str
    names: list[str] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    blocks: list[Blocks | None] = field(default_factory=list)


class ParameterRow(NamedTuple):
    """The row of one parameter in the table that `format_table` makes."""

    parameter: str
    method: str
    shape: tuple[int, ...]
    blocks: str
    lr_factor: float
    weight_decay: float
    schedule: str


def assign(named_parameters: Iterable[tuple[str, nn.Parameter]], rules: Sequence[Rule]) -> list[Group]:
    """Sort parameters into groups; the first rule that matches a parameter's name applies to it.

    Parameters that require no gradient are sorted too, because they may be unfrozen later; an optimizer step skips
    parameters without a gradient. Raises ValueError that lists every problem: parameters that no rule matches, rules
    that match no parameter, duplicate names, and rules whose method, blocks or settings do not fit the parameter.
    """
    problems = [f"rule {rule.pattern!r}: {problem}" for rule in rules for problem in _rule_problems(rule)]
    patterns = [_compile(rule.pattern, problems) for rule in rules]
    groups: dict[tuple, Group] = {}
    used: set[int] = set()
    names: set[str] = set()
    owners: dict[int, str] = {}
    for name, parameter in named_parameters:
        if name in names:
            problems.append(f"parameter {name}: the name occurs twice")
        if id(parameter) in owners:
            problems.append(
                f"parameter {name}: is the same tensor as {owners[id(parameter)]}; list the tensor only once"
            )
        names.add(name)
        owners[id(parameter)] = name
        index = next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)
        if index is None:
            problems.append(f"parameter {name} {_shape_text(parameter.shape)}: no rule matches its name")
            continue
        used.add(index)
        rule = rules[index]
        problems += [f"parameter {name} (rule {rule.pattern!r}): {p}" for p in _fit_problems(rule, parameter.shape)]
        key = (rule.method, rule.lr_factor, rule.weight_decay, rule.schedule)
        group = groups.setdefault(key, Group(*key))
        group.names.append(name)
        group.params.append(parameter)
        group.blocks.append(rule.blocks)
    problems += [
        f"rule {rule.pattern!r}: names no parameter (misspelt, or hidden by an earlier rule)"
        for i, rule in enumerate(rules)
        if i not in used and not rule.optional
    ]
    if problems:
        raise ValueError("parameter rules do not fit the model:\n  " + "\n  ".join(problems))
    return list(groups.values())


def blocks_text(shape: Sequence[int], blocks: Blocks | None) -> str:
    """Returns the number and shape of the matrices that Muon orthogonalises in a weight, as text like "64 x [512,
    1280]".
    """
    if len(shape) == 3:
        return f"{shape[0]} x [{shape[1]}, {shape[2]}]"
    if blocks is None:
        return "whole"
    return " + ".join(f"{count} x [{rows}, {shape[1]}]" for count, rows in blocks)


def format_table(rows: Sequence[ParameterRow]) -> str:
    """Returns `rows` as an aligned text table whose last line gives the number of parameters.

    Parameters that differ only in their layer number share a line, such as `layers.{0-39}.attn.wq_a.weight`.
    """
    folded: dict[tuple, list[int | None]] = {}
    for row in rows:
        head, number, tail = _split_number(row.parameter)
        folded.setdefault((head, tail, *row[1:]), []).append(number)
    lines = [("parameter", "method", "shape", "heads or blocks", "lr factor", "weight decay", "schedule", "tensors")]
    for (head, tail, method, shape, blocks, lr_factor, weight_decay, schedule), numbers in folded.items():
        name = head + _ranges(numbers) + tail
        factors = f"{lr_factor:g}", f"{weight_decay:g}"
        lines.append((name, method, _shape_text(shape), blocks, *factors, schedule, str(len(numbers))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, f"{len(rows)} tensors, {sum(prod(row.shape) for row in rows):,} parameters"])


def _compile(pattern: str, problems: list[str]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        problems.append(f"rule {pattern!r}: is not a regular expression: {error}")
        return re.compile(r"(?!)")  # matches nothing


def _rule_problems(rule: Rule) -> list[str]:
    problems = []
    if rule.method not in METHODS:
        problems.append(f"method must be one of {', '.join(METHODS)}, got {rule.method!r}")
    if rule.blocks is not None and rule.method != "muon":
        problems.append(f"blocks are allowed only with method muon, got them with {rule.method!r}")
    if rule.blocks is not None and not all(count > 0 and rows > 0 for count, rows in rule.blocks):
        problems.append(f"blocks must be (count, rows) pairs of positive integers, got {rule.blocks!r}")
    if not rule.lr_factor > 0:
        problems.append(f"lr_factor must be above 0, got {rule.lr_factor!r}")
    if not rule.weight_decay >= 0:
        problems.append(f"weight_decay must be at least 0, got {rule.weight_decay!r}")
    if rule.method == "sinkhorn" and rule.weight_decay:
        problems.append(f"weight_decay must be 0 with method sinkhorn, got {rule.weight_decay!r}")
    return problems


def _fit_problems(rule: Rule, shape: Sequence[int]) -> list[str]:
    if rule.method == "muon" and len(shape) not in (2, 3):
        return [f"muon needs a matrix [m, n] or a stack [E, m, n], the shape is {_shape_text(shape)}"]
    if rule.method == "sinkhorn" and len(shape) != 2:
        return [f"sinkhorn needs a table [rows, columns], the shape is {_shape_text(shape)}"]
    if rule.blocks is None:
        return []
    if len(shape) != 2:
        return [f"blocks split a 2-D weight, the shape is {_shape_text(shape)}"]
    total = sum(count * rows for count, rows in rule.blocks)
    return [] if total == shape[0] else [f"blocks {rule.blocks!r} cover {total} rows, the weight has {shape[0]}"]


def _split_number(name: str) -> tuple[str, int | None, str]:
    """Returns a parameter name split at its first layer number, such as ("layers.", 3, ".attn.wq_a.weight")."""
    match = re.search(r"(?<=\.)\d+(?=\.)", name)
    return (name[: match.start()], int(match.group()), name[match.end() :]) if match else (name, None, "")


def _ranges(numbers: Sequence[int | None]) -> str:
    """Returns ascending layer numbers as text, such as "3" or "{0-2,5}", or an empty string for a parameter name
    without a layer number.
    """
    runs: list[list[int]] = []
    for number in sorted(n for n in numbers if n is not None):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _shape_text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
