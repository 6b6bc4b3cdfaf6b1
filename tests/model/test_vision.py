"""Vision tower, aligner and the place of image features in the text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from golden_files import golden
from safetensors.torch import load_file
from tiny import GRIDS, assert_same, gradients, image_batch, no_rounding, tiny_model, tokens  # noqa: F401

from model import load_pretrained
from model.vision import END, IMAGE, NEWLINE, START


def test_golden_tower_and_aligner() -> None:
    folder = golden("detail/c2_images_engram_pad")
    inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    model = load_pretrained(folder)
    tower, aligned = [], []
    model.vision.blocks[-1].register_forward_hook(lambda module, args, out: tower.append(model.vision.norm(out)))
    with torch.no_grad():
        features = model.aligner(model.vision(inputs["pixel_values"].float(), inputs["image_grid_hws"]))
    counts = [-(-h // 3) * -(-w // 3) for h, w in inputs["image_grid_hws"].tolist()]
    aligned = features.split(counts)
    assert len(aligned) == len(tower) == 2
    for image in (0, 1):
        torch.testing.assert_close(tower[image][0], expected[f"vision_out.{image}"], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(aligned[image], expected[f"aligner_out.{image}"], atol=2e-5, rtol=1e-5)


def test_tower_against_a_plain_loop() -> None:
    """Attention, 2-D rotation (rows first, then columns) and unshuffle written out for one image."""
    model = tiny_model(vision=True)
    h, w = 4, 5
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(h * w, 3, 2, 2, generator=generator)
    ours = model.vision(patches, torch.tensor([[h, w]]))
    block = model.vision.blocks[0]
    x = patches.flatten(1) @ model.vision.patch_embed.proj.weight.t() + model.vision.patch_embed.proj.bias
    q, k, v = block.attn.wqkv(norm(x, block.norm1)).chunk(3, dim=-1)
    heads = []
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        qh, kh = (torch.stack([turn(y[p, part], p // w, p % w) for p in range(h * w)]) for y in (q, k))
        heads.append((qh @ kh.t() * 8**-0.5).softmax(-1) @ v[:, part])
    x = x + block.attn.wo(torch.cat(heads, -1))
    gate, up = block.mlp.w1(norm(x, block.norm2)).chunk(2, -1)
    x = norm(x + block.mlp.w2(F.silu(gate) * up), model.vision.norm)
    cells = []
    for row in range(2):
        for column in range(2):
            inside = [
                x[(3 * row + i) * w + 3 * column + j] if 3 * row + i < h and 3 * column + j < w else torch.zeros(16)
                for i in range(3)
                for j in range(3)
            ]
            cells.append(torch.stack(inside, -1).flatten())  # channel-major
    torch.testing.assert_close(ours, torch.stack(cells), atol=1e-5, rtol=1e-5)


def norm(x: torch.Tensor, module) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight


def turn(x: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """Channel i of 8 turns with i + 4; the first two pairs by the row, the others by the column."""
    frequency = 10000.0 ** -(torch.arange(2) / 2)
    angle = torch.cat([row * frequency, column * frequency])
    a, b = x[:4], x[4:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def test_images_of_a_batch_do_not_see_each_other() -> None:
    model = tiny_model(vision=True)
    batch = image_batch()
    sizes = [h * w for h, w in GRIDS]
    together = model.vision(batch["pixel_values"], batch["image_grid_hws"])
    alone = [
        model.vision(patches, torch.tensor([grid]))
        for patches, grid in zip(batch["pixel_values"].split(sizes), GRIDS, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)


def test_learned_vectors_and_features_replace_the_embedding() -> None:
    model = tiny_model(vision=True)
    batch = image_batch()
    out = model(**batch, output_hidden_states=True)
    x, types = out.hidden_states[0][0, :, 0], batch["vision_token_types"][0]
    for kind, vector in ((START, model.image_start), (NEWLINE, model.image_newline), (END, model.image_end)):
        assert torch.equal(x[types == kind], vector.expand(int((types == kind).sum()), -1))
    features = model.aligner(model.vision(batch["pixel_values"], batch["image_grid_hws"]))
    assert torch.equal(x[types == IMAGE], features)
    assert torch.equal(x[types < 0], model.embed(batch["input_ids"][0][types < 0]))
    out.loss.backward()
    for name in ("vision.patch_embed.proj.weight", "aligner.w2.bias", "image_start", "image_end", "image_newline"):
        assert model.get_parameter(name).grad.abs().max() > 0, name
    assert model.embed.weight.grad[3].abs().max() == 0, "the placeholder's own embedding is never read"


def test_image_features_go_to_their_own_image(no_rounding) -> None:  # noqa: F811
    """Two rows with an image each equal the rows alone."""
    model = tiny_model(vision=True, engram=True)
    rows = [image_batch([(3, 5)], 16, seed=1), image_batch([(6, 3)], 16, seed=2)]
    both = model(**{key: torch.cat([row[key] for row in rows]) for key in rows[0]})
    for row, batch in enumerate(rows):
        torch.testing.assert_close(both.logits[row], model(**batch).logits[0], atol=1e-4, rtol=1e-4)


def test_disagreements_are_refused() -> None:
    model = tiny_model(vision=True)
    batch = image_batch()
    with pytest.raises(ValueError, match="48 patches, but pixel_values has 47"):
        model(**batch | {"pixel_values": batch["pixel_values"][1:]})
    fewer = batch["vision_token_types"].clone()
    fewer[fewer == IMAGE] = NEWLINE
    with pytest.raises(ValueError, match="0 IMAGE tokens.*give 6"):
        model(**batch | {"vision_token_types": fewer})
    with pytest.raises(ValueError, match="vision_config"):
        tiny_model()(**batch)


def test_model_with_a_tower_runs_text() -> None:
    model = tiny_model(vision=True)
    assert model(tokens(2, 12)).logits.isfinite().all()
