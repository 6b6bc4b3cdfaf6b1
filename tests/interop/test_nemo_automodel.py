"""NVIDIA's nemo-automodel 0.7.0: its configuration class reads an export, and its model and drafter compute the same,
on the toy with Engram and images.

Its eager CPU path is used as it is. It checkpoints in bf16, so the dtype it computes in is set to fp32 here.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from model import load_drafter
from tests.interop.conftest import FORMATS, Toy, assert_agree
from tests.model.golden_files import golden

pytestmark = [pytest.mark.interop, pytest.mark.slow]
config_module = pytest.importorskip(
    "nemo_automodel.components.models.deepseek_v41.config",
    reason="nemo-automodel is not installed: make interop-install",
)


@pytest.fixture(scope="module", params=FORMATS)
def both(request, full_toy: Toy):
    """(our model, theirs) of one folder."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from transformers import AutoTokenizer

    folder = full_toy[request.param]
    config = config_module.DeepseekV41Config.from_pretrained(folder)
    config.dtype = config.text_config.dtype = "float32"
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
        gate_precision="float32",
    )
    theirs = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=AutoTokenizer.from_pretrained(folder))
    theirs.initialize_weights(dtype=torch.float32)
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    theirs.load_state_dict(theirs.state_dict_adapter.from_hf(stored))
    return full_toy.load(request.param), theirs.float().eval()


@pytest.mark.parametrize("format", FORMATS)
def test_the_configuration_is_read_key_for_key(full_toy: Toy, text_toy: Toy, format: str) -> None:
    config = config_module.DeepseekV41Config.from_pretrained(full_toy[format])
    ours = full_toy.load(format).config.to_dict()
    for section in ("text_config", "vision_config"):
        theirs = getattr(config, section)
        for key, value in ours[section].items():
            found = getattr(theirs, key)
            if key == "rope_scaling":  # transformers puts the base beside it
                found = {name: found[name] for name in found.keys() - {"rope_theta"}}
            assert found == value, key
    assert config.text_config.engram_num_embeddings == [462, 630]
    assert str(config.dtype) == ("torch.bfloat16" if format == "bf16" else "torch.float32")
    assert (getattr(config, "quantization_config", None) is not None) == (format == "released")
    text = config_module.DeepseekV41Config.from_pretrained(text_toy[format])
    assert text.vision_config.num_hidden_layers == 0  # and not the released tower, its default


def test_text_logits_agree(both, passages) -> None:
    ours, theirs = both
    ids = torch.tensor(passages)
    with torch.no_grad():
        # A flipped FP4 value moves the tokens behind it too: 86 % agree in the bf16 folder, more in the others.
        assert_agree(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, share=0.8)


def test_image_logits_and_loss_agree(both) -> None:
    """Two images of unlike shapes inside the text; the case is made for another toy of the same patches and ids."""
    ours, theirs = both
    batch = load_file(golden("vision") / "inputs.safetensors")
    names = ("input_ids", "labels", "pixel_values", "image_grid_hws", "vision_token_types")
    batch = {name: batch[name] for name in names}
    assert (batch["vision_token_types"] == 1).sum() >= 10
    with torch.no_grad():
        mine, other = ours(**batch), theirs(**batch)
        assert_agree(mine.logits, other.logits)
        assert abs(mine.loss - other.loss) < 1e-4
        blind = ours(**{**batch, "pixel_values": torch.zeros_like(batch["pixel_values"])})
    assert (blind.logits - mine.logits).abs().max() > 1e-2


@pytest.mark.parametrize("format", FORMATS)
def test_drafts_agree(drafter_toy: Toy, format: str) -> None:
    """Their drafter reads `mtp.*` of an export and gives the same logits from the same states of the backbone.

    Its confidence head reads the state after the last norm, ours the state before it, as in the released code. Fed with
    the state that the other reads, each head gives the other's confidence.
    """
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.dspark import DeepseekV41DSparkModel

    folder = drafter_toy[format]
    ours = load_drafter(folder, drafter_toy.load(format))
    config = config_module.DeepseekV41Config.from_pretrained(folder).text_config
    config.dtype = "float32"
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
        gate_precision="float32",
    )
    theirs = DeepseekV41DSparkModel(config, backend, num_anchors=1, enable_confidence_head=True)
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    theirs.load_state_dict(theirs.state_dict_adapter.from_hf(stored))
    theirs = theirs.float().eval()

    ids = torch.randint(5, 500, (1, 60), generator=torch.Generator().manual_seed(0))
    anchors, size = torch.tensor([2, 9, 33, 55]), ours.block_size
    before = ids[0, anchors[:, None] + torch.arange(size)]
    with torch.no_grad():
        mine = ours(ids, anchors, before[:, 0], before)
        features = ours.backbone.features(ours.config.text.dspark_target_layer_ids, ids)
        noise = torch.full((len(anchors), size), config.dspark_noise_token_id)
        noise[:, 0] = before[:, 0]
        found = super(DeepseekV41DSparkModel, theirs).forward(
            theirs.embed_tokens(noise.flatten()[None]),
            features.entering[None],
            position_ids=theirs.build_position_ids(anchors[None], ids.shape[1]),
            attention_mask=theirs.build_attention_mask(
                anchors[None], torch.ones_like(anchors[None], dtype=torch.bool), ids.shape[1], torch.float32
            ),
            previous_token_ids=before.flatten()[None],
        )
        logits = theirs.compute_logits(found.normalized_hidden_states) + found.transition_logits
        other = found.confidence_pred.view_as(mine.confidence)
        last = ours.mtp[-1]
        swapped = last.confidence_head(last.norm(mine.hidden), last.markov_head.embed(before))
    assert_agree(mine.logits, logits.view_as(mine.logits))
    assert (mine.confidence - other).abs().max() > 1e-2
    assert (swapped - other).abs().median() < 1e-4
