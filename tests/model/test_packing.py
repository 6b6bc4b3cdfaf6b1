"""A layout equals its documents run alone; padding on either side equals none."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_same, gradients, no_rounding, tiny_config, tiny_model, tokens  # noqa: F401

from model import ForwardOptions, LossWeights
from model.layout import build_layout

pytestmark = pytest.mark.usefixtures("no_rounding")
LENGTHS = [[13, 1, 22], [2, 30, 3]]  # odd, one token, shorter than the window; the second row ends in padding
WIDTH = 36
PATHS = ["dense", "sparse"]


def packed_batch() -> dict[str, torch.Tensor]:
    ids = tokens(2, WIDTH)
    ids[1, 35] = 2
    labels = ids.clone()
    labels[1, 35] = -100
    labels[0, 5:8] = -100  # some unsupervised tokens inside
    return {"input_ids": ids, "labels": labels, "seq_lens": torch.tensor(LENGTHS)}


def documents(batch: dict[str, torch.Tensor]) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """(row, first position, the document as a batch of its own)."""
    alone = []
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            part = {key: batch[key][row : row + 1, at : at + length] for key in ("input_ids", "labels")}
            alone.append((row, at, part))
            at += length
    return alone


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("engram", [False, True])
def test_pack_equals_its_documents(attention: str, engram: bool) -> None:
    """Logits, and every term and gradient of the training loss."""
    model = tiny_model(ForwardOptions(attention=attention), loss_weights=LossWeights(router_balance=0.1), engram=engram)
    batch = packed_batch()
    alone = documents(batch)
    logits = model(**batch).logits
    for row, at, part in alone:
        ours = logits[row, at : at + part["input_ids"].shape[1]]
        torch.testing.assert_close(ours, model(part["input_ids"]).logits[0], atol=2e-5, rtol=1e-4)
    assert logits[1, 35].abs().max() == 0

    denominators = model.loss_denominators(**batch)
    parts = [model.loss_denominators(**part) for _, _, part in alone]
    assert torch.equal(denominators.to_tensor(), sum(parts[1:], parts[0]).to_tensor())
    packed = model.losses(**batch, denominators=denominators)
    packed.total.backward()
    together = gradients(model)
    model.zero_grad()
    pieces = [model.losses(**part, denominators=denominators) for _, _, part in alone]
    for name in ("total", "lm_sum", "balance_sum", "index_kl_sum"):
        added = torch.stack([getattr(piece, name) for piece in pieces]).sum(0)
        torch.testing.assert_close(getattr(packed, name), added, atol=1e-4, rtol=1e-5)
    for name in ("supervised", "index_queries", "expert_load"):
        assert torch.equal(getattr(packed, name), sum(getattr(piece, name) for piece in pieces)), name
    sum(piece.total for piece in pieces).backward()
    assert_same(gradients(model), together, 1e-4)


@pytest.mark.parametrize("attention", PATHS)
def test_padding_on_either_side_equals_none(attention: str) -> None:
    model = tiny_model(ForwardOptions(attention=attention), engram=True)
    ids = tokens(1, 19)
    plain = {"input_ids": ids, "labels": ids}
    reference = model(**plain)
    denominators = model.loss_denominators(**plain)
    loss = model.losses(**plain, denominators=denominators)
    for left in (0, 4):

        def pad(x: torch.Tensor, value: int, left: int = left) -> torch.Tensor:
            return torch.nn.functional.pad(x, (left, 6 - left), value=value)

        padded = {
            "input_ids": pad(ids, 2),
            "labels": pad(ids, -100),
            "attention_mask": pad(torch.ones_like(ids), 0),
        }
        out = model(**padded)
        assert torch.equal(out.logits[:, left : left + 19], reference.logits)
        assert torch.equal(out.loss, reference.loss)
        assert torch.equal(model.loss_denominators(**padded).to_tensor(), denominators.to_tensor())
        assert torch.equal(model.losses(**padded, denominators=denominators).total, loss.total)


def test_tail_behind_seq_lens_is_padding() -> None:
    model = tiny_model()
    ids = tokens(1, 12)
    mask = torch.ones_like(ids)
    mask[:, 9:] = 0
    by_lengths = model(ids, seq_lens=torch.tensor([[9, 0]])).logits
    assert torch.equal(by_lengths, model(ids, attention_mask=mask).logits)
    assert by_lengths[:, 9:].abs().max() == 0


def test_a_target_never_crosses_documents() -> None:
    model = tiny_model()
    ids = tokens(1, 10)
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([[4, 1, 5]])}
    assert model.loss_denominators(**batch).supervised == 3 + 0 + 4
    logits = model(ids, seq_lens=batch["seq_lens"]).logits[0]
    places = torch.tensor([0, 1, 2, 5, 6, 7, 8])
    loss = torch.nn.functional.cross_entropy(logits[places], ids[0, places + 1])
    torch.testing.assert_close(model(**batch).loss, loss)


def test_layout() -> None:
    """Slots of every document begin at a whole block; entry j sits at position j*r of its document."""
    config = tiny_config().text
    layout = build_layout(config, torch.zeros(1, 20, dtype=torch.int64), seq_lens=torch.tensor([[11, 5, 1]]))
    assert layout.tokens == 17
    assert layout.position.tolist() == [*range(11), *range(5), 0]
    assert layout.document_start.tolist() == [0] * 11 + [11] * 5 + [16]
    pairs = layout.entries[2]
    assert pairs.visible_from.tolist() == [0] * 11 + [8] * 5 + [12]
    assert pairs.visible_to.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 8, 9, 9, 10, 10, 12]
    assert pairs.members[:5].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert pairs.members[8:10].tolist() == [[11, 12], [13, 14]]
    assert layout.entries[1].visible_to[-1] == layout.entries[1].visible_from[-1] + 1


MALFORMED = [
    ({"seq_lens": [[3, 4]], "attention_mask": [[1] * 8]}, "not both"),
    ({"seq_lens": [[5, 4]]}, "row 0 is .5, 4."),
    ({"seq_lens": [[-1, 4]]}, "row 0"),
    ({"seq_lens": [[3], [4]]}, r"\[1, documents\]"),
    ({"attention_mask": [[1, 1, 0, 1, 1, 1, 1, 1]]}, "row 0 has zeros between ones"),
    ({"attention_mask": [[1, 1]]}, r"\[1, 8\]"),
    ({"attention_mask": [[0] * 8]}, "only padding and no token"),
]


@pytest.mark.parametrize(("inputs", "message"), MALFORMED)
def test_malformed_layouts_are_refused(inputs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_layout(tiny_config().text, tokens(1, 8), **{k: torch.tensor(v) for k, v in inputs.items()})
