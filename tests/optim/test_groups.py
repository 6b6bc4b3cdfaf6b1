"""Rules: first match wins, nothing falls through, every problem is named at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim import Optimizer, Rule, assign, format_table


def _named(**shapes):
    return [(name.replace("__", "."), nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def test_first_match_wins_and_groups_share_their_numbers():
    named = _named(a__weight=(4, 4), b__weight=(6, 4), a__bias=(4,))
    rules = [
        Rule(r"a\.weight", "muon", weight_decay=0.1),
        Rule(r".*\.weight", "muon", blocks=((2, 3),), weight_decay=0.1),
        Rule(r".*", "adamw"),
    ]
    muon, adamw = assign(named, rules)
    assert (muon.names, muon.blocks) == (["a.weight", "b.weight"], [None, ((2, 3),)])
    assert (muon.method, muon.lr_factor, muon.weight_decay, muon.schedule) == ("muon", 1.0, 0.1, "main")
    assert adamw.names == ["a.bias"] and adamw.params[0] is named[2][1]


def test_pattern_must_match_the_whole_name():
    with pytest.raises(ValueError, match=r"embed\.weight \[2, 2\]: no rule matches its name"):
        assign(_named(embed__weight=(2, 2)), [Rule(r"embed", "adamw", optional=True)])


def test_every_problem_is_listed():
    named = _named(x=(2, 2), y=(3,), vec=(3,), cube=(2, 2, 2), flat=(6, 2), experts=(2, 6, 2), spare=(1,))
    rules = [
        Rule(r"vec", "muon"),
        Rule(r"cube", "sinkhorn"),
        Rule(r"flat", "muon", blocks=((2, 2), (1, 1))),
        Rule(r"experts", "muon", blocks=((2, 3),)),
        Rule(r"nothing", "adamw"),
        Rule(r"spare", "adamw", lr_factor=0.0, weight_decay=-1.0),
        Rule(r"flat", "adamw"),  # hidden by the rule above
    ]
    with pytest.raises(ValueError) as error:
        assign(named, rules)
    text = str(error.value)
    for part in (
        "parameter x [2, 2]: no rule matches its name",
        "parameter y [3]: no rule matches its name",
        "parameter vec (rule 'vec'): muon needs a matrix",
        "parameter cube (rule 'cube'): sinkhorn needs a table",
        "cover 5 rows, the weight has 6",
        "blocks split a 2-D weight, the shape is [2, 6, 2]",
        "rule 'nothing': names no parameter",
        "rule 'flat': names no parameter",
        "lr_factor must be above 0",
        "weight_decay must be at least 0",
    ):
        assert part in text, f"missing {part!r} in:\n{text}"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("x", "sgd"), "method must be one of muon, sinkhorn, adamw"),
        (Rule("x", "adamw", blocks=((1, 2),)), "blocks are allowed only with method muon"),
        (Rule("x", "muon", blocks=((0, 2), (1, 2))), "positive integers"),
        (Rule("x", "sinkhorn", weight_decay=0.1), "weight_decay must be 0 with method sinkhorn"),
        (Rule("x(", "adamw"), "not a regular expression"),
    ],
)
def test_bad_rules_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        assign(_named(x=(2, 2)), [rule])


def test_a_shared_parameter_is_refused():
    tied = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="head: is the same tensor as embed"):
        assign([("embed", tied), ("head", tied)], [Rule(".*", "adamw")])


def test_optional_rules_may_name_nothing():
    assert len(assign(_named(x=(2,)), [Rule("x", "adamw"), Rule("y", "adamw", optional=True)])) == 1


def test_table_names_every_parameter_and_folds_equal_layers():
    shapes = {f"layers__{i}__wq": (6, 4) for i in (0, 1, 2, 5)} | {"layers__3__wq": (8, 4), "embed": (9, 4), "b": (4,)}
    rules = [
        Rule(r"layers\.3\.wq", "muon", blocks=((2, 4),)),
        Rule(r"layers\.\d+\.wq", "muon", blocks=((2, 3),), weight_decay=0.1),
        Rule("embed", "sinkhorn", lr_factor=5.0),
        Rule("b", "adamw", schedule="vision"),
    ]
    optimizer = Optimizer(assign(_named(**shapes), rules))
    rows = optimizer.table()
    assert [row.parameter for row in rows] == sorted(name.replace("__", ".") for name in shapes)
    text = format_table(rows)
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines()}
    assert lines["layers.{0-2,5}.wq"] == "layers.{0-2,5}.wq muon [6, 4] 2 x [3, 4] 1 0.1 main 4"
    assert lines["layers.3.wq"] == "layers.3.wq muon [8, 4] 2 x [4, 4] 1 0 main 1"
    assert lines["embed"] == "embed sinkhorn [9, 4] - 5 0 main 1"
    assert lines["b"] == "b adamw [4] - 1 0 vision 1"
    assert text.splitlines()[-1] == f"7 tensors, {4 * 24 + 32 + 36 + 4} parameters"
