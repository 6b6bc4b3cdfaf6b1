"""mlx-lm, Apple's engine: the trained toy without Engram gives the same continuations and logits there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.interop.conftest import FORMATS, Toy, assert_agree

pytestmark = [pytest.mark.interop, pytest.mark.slow]
mx = pytest.importorskip("mlx.core", reason="mlx is not installed: make interop-install")
mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: make interop-install")
generation = pytest.importorskip("mlx_lm.generate")  # the module; the package has a function of this name


def logits_of(model, passages: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(model(mx.array(passages)).astype(mx.float32)))


@pytest.fixture(scope="module", params=FORMATS)
def both(request, text_toy: Toy):
    """(format, our model, theirs, their tokenizer)."""
    theirs, tokenizer = mlx_lm.load(str(text_toy[request.param]))
    if request.param == "bf16":  # the weights as stored; the arithmetic in fp32, as ours is here
        theirs.set_dtype(mx.float32)
    return request.param, text_toy.load(request.param), theirs, tokenizer


def test_logits_agree(both, passages) -> None:
    _, ours, theirs, _ = both
    with torch.no_grad():
        assert_agree(ours(input_ids=torch.tensor(passages)).logits, logits_of(theirs, passages))


def test_greedy_continuations_agree(both) -> None:
    """With their cache, their prompt handling, and BOS put in front by the exported tokenizer. Where two tokens are all
    but equally likely, rounding may take either.
    """
    _, ours, theirs, tokenizer = both
    for prompt in ("def main(self, x):\n    ", "The items of a heap"):
        ids = tokenizer.encode(prompt)
        assert ids[0] == 0 and 1 in tokenizer.eos_token_ids
        found = [int(token) for token, _ in generation.generate_step(mx.array(ids), theirs, max_tokens=24)]
        with torch.no_grad():
            logits = ours(input_ids=torch.tensor([[*ids, *found]])).logits[0, len(ids) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
        assert behind.max() <= 0.02 and (behind == 0).float().mean() >= 0.9, behind


def test_quantised_weights_stay_packed_there(text_toy: Toy) -> None:
    theirs, _ = mlx_lm.load(str(text_toy["released"]))
    layer = theirs.model.layers[0]
    assert layer.self_attn.q_a_proj.weight.dtype == mx.uint32 and layer.self_attn.q_a_proj.bits == 8
    assert layer.mlp.experts.switch_mlp.gate_proj.bits == 4


def test_quantisation_moves_the_logits_as_much_there_as_here(text_toy: Toy, passages) -> None:
    exact, packed = (text_toy.load(format) for format in ("plain", "released"))
    theirs, _ = mlx_lm.load(str(text_toy["released"]))
    with torch.no_grad():
        ours = (packed(input_ids=torch.tensor(passages)).logits, exact(input_ids=torch.tensor(passages)).logits)
    error = (ours[0] - ours[1]).abs()
    there = (logits_of(theirs, passages) - ours[1]).abs()
    assert error.mean() > 0.01  # quantisation is not free, and cannot hide a difference in the mathematics
    assert abs(there.mean() / error.mean() - 1) < 0.02


def test_their_chat_template_is_ours(text_toy: Toy) -> None:
    from data import DataConfig, load_tokenizer
    from data.chat.prompt import prompt_ids

    _, tokenizer = mlx_lm.load(str(text_toy["plain"]))
    messages = [{"role": "user", "content": "What is a heap?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == prompt_ids(load_tokenizer(DataConfig(tokenizer=str(text_toy["plain"]))), messages)
