"""The transformers class decodes with the drafter of its folder, and keeps it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TextStreamer

import model.huggingface
import model.huggingface.speculation
from model import save_pretrained
from model.generation import generate
from model.huggingface import DeepseekV41ForCausalLM
from tests.model.test_huggingface import PROMPTS, padded
from tests.model.tiny import no_rounding, tiny_drafter  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder that holds a drafter."""
    drafter = tiny_drafter()
    save_pretrained(drafter.backbone, tmp_path / "both", drafter=drafter)
    return tmp_path / "both"


@pytest.fixture
def drafting(folder: Path) -> DeepseekV41ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def calls(monkeypatch) -> list[list]:
    """The requests of every call that decodes with the drafter."""
    made = []

    def recorded(built, requests, **options):
        assert options["drafter"] is not None
        made.append(requests)
        return generate(built, requests, **options)

    monkeypatch.setattr(model.huggingface.speculation, "generate", recorded)
    return made


def test_greedy_tokens_are_those_without_a_drafter(drafting, calls, no_rounding) -> None:  # noqa: F811
    """Over a padded batch; rows that end early are padded alike."""
    batch = padded(PROMPTS)
    options = dict(max_new_tokens=14, do_sample=False, pad_token_id=7)
    plain = drafting.generate(**batch, **options, eos_token_id=-1, use_drafter=False)
    assert not calls
    assert torch.equal(drafting.generate(**batch, **options, eos_token_id=-1), plain) and len(calls) == 1
    ends = plain[:2, -12].tolist()
    stopped = drafting.generate(**batch, **options, eos_token_id=ends, use_drafter=False)
    assert (stopped[:, -1] == 7).any() and stopped.shape[1] < plain.shape[1]
    assert torch.equal(drafting.generate(**batch, **options, eos_token_id=ends), stopped) and len(calls) == 2
    first = {name: tensor[:1] for name, tensor in batch.items()}
    alone = drafting.generate(**first, **options, eos_token_id=-1, use_drafter=True)
    assert torch.equal(alone, plain[:1]) and len(calls) == 3


def test_sampling_takes_temperature_and_top_p(drafting, calls) -> None:
    batch, found = padded(PROMPTS), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        options = dict(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=6, eos_token_id=-1)
        found.append(drafting.generate(**batch, **options, num_return_sequences=2))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert [(r.temperature, r.top_p, r.max_tokens, r.prompt) for r in calls[0]] == [
        (0.7, 0.9, 6, tuple(prompt)) for prompt in PROMPTS for _ in range(2)
    ]
    assert len({r.seed for r in calls[0]}) == 6


def test_what_a_drafter_cannot_serve_goes_without(drafting, calls) -> None:
    batch = padded(PROMPTS)

    class Silent(TextStreamer):
        def __init__(self):
            self.pieces = []

        def put(self, value):
            self.pieces.append(value)

        def end(self):
            pass

    streamer = Silent()
    for options, named in (
        (dict(do_sample=True, top_k=8), "top_k"),
        (dict(do_sample=False, repetition_penalty=1.2), "RepetitionPenaltyLogitsProcessor"),
        (dict(do_sample=False, max_time=60.0), "MaxTimeCriteria"),
        (dict(do_sample=False, return_dict_in_generate=True, output_scores=True), "output_scores"),
        (dict(do_sample=False, use_cache=False), "use_cache=False"),
        (dict(do_sample=False, streamer=streamer), "streamer"),
    ):
        inputs = {name: tensor[:1] for name, tensor in batch.items()} if "streamer" in options else batch
        options |= dict(max_new_tokens=3, eos_token_id=-1)
        drafting.generate(**inputs, **options)
        with pytest.raises(ValueError, match=f"cannot draft under .*{named}"):
            drafting.generate(**inputs, **options, use_drafter=True)
    drafting.generate(**batch, do_sample=False, num_beams=2, max_new_tokens=3, eos_token_id=-1)
    assert not calls and len(streamer.pieces) > 3


def test_folders_keep_their_drafter(folder: Path, drafting, tmp_path: Path) -> None:
    drafting.save_pretrained(tmp_path / "again")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert any(name.startswith("mtp.") for name in before) and before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    without = AutoModelForCausalLM.from_pretrained(folder, drafter=False)
    assert without.drafter is None
    with pytest.raises(ValueError, match="use_drafter=True: there is no drafter"):
        without.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, use_drafter=True)


def test_the_drafter_goes_where_the_model_goes(folder: Path, drafting, calls) -> None:
    """But it is no part of what trains."""
    held = {id(parameter) for parameter in drafting.parameters()}
    assert not held & {id(parameter) for parameter in drafting.drafter.parameters()}
    assert not any("mtp" in name for name in drafting.state_dict())
    copied = copy.deepcopy(drafting)
    assert copied.drafter.backbone is copied.model and drafting.drafter.backbone is drafting.model
    copied.to("meta")
    assert copied.drafter.mtp[0].main_proj.weight.device.type == "meta"
    assert drafting.drafter.mtp[0].main_proj.weight.device.type == "cpu"
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert rounded.drafter.mtp[0].main_proj.weight.dtype == torch.bfloat16
    result = rounded.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=5, do_sample=False, eos_token_id=-1)
    assert result.shape == (1, 35) and len(calls) == 1
