"""The drafter against numbers of the released inference code (tests/golden/dspark), and against itself: batched and
plain, packed and alone, one process and two, written and read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import model.attention
from model import (
    Drafter,
    DraftObjective,
    ForwardOptions,
    ModelConfig,
    build_drafter,
    build_model,
    convert_checkpoint,
    count,
    load_drafter,
    load_pretrained,
    merge_checkpoints,
    open_folder,
    save_pretrained,
)
from model.checkpoint.names import released_names
from model.dspark import DraftDenominators
from model.loss import draft_distances
from model.parallel.ranks import Parallel
from tests import processes
from tests.model.golden_files import golden
from tests.model.test_parallel import NOISE, assembled, ranks_of
from tests.model.tiny import (  # noqa: F401
    DRAFTER,
    assert_same,
    gradients,
    image_batch,
    no_rounding,
    switch_rounding_off,
    tiny_config,
    tiny_drafter,
    tiny_model,
    tokens,
)

STATE = 3e-4  # of logits, streams and states; the other tolerances stand where they are used


class Case:
    """The golden case, run by one attention path, with what the stages see on the way."""

    def __init__(self, attention: str):
        folder = golden("dspark")
        self.inputs, self.expected = (
            load_file(folder / "inputs.safetensors"),
            load_file(folder / "expected.safetensors"),
        )
        self.drafter = load_drafter(folder, load_pretrained(folder, runtime=ForwardOptions(attention=attention)))
        self.features = self.drafter.backbone.features((5, 6, 7), self.inputs["input_ids"])
        self.stages: list[tuple] = []
        self.keys: list[Tensor] = []
        hooks = [s.register_forward_hook(lambda stage, _, out: self.stages.append(out)) for s in self.drafter.mtp]
        with pytest.MonkeyPatch.context() as patch:
            rounder = model.attention.fake_quant_fp8
            patch.setattr(model.attention, "fake_quant_fp8", lambda x: self.keys.append(rounder(x)) or self.keys[-1])
            names = ("input_ids", "anchors", "anchor_tokens", "previous_tokens")
            self.drafted = self.drafter(*(self.inputs[name] for name in names))
        for hook in hooks:
            hook.remove()
        self.draft = self.drafter.draft(*(self.inputs[name] for name in names[:3]))

    def check(self, name: str, ours: Tensor, tolerance: float) -> None:
        theirs = self.expected[name]
        assert ours.shape == theirs.shape, name
        assert (ours - theirs).abs().max() <= tolerance, name

    def loss(self, detach: bool):
        self.drafter.zero_grad()
        batch = (self.inputs[name] for name in ("input_ids", "labels", "loss_anchors"))
        return self.drafter.loss(*batch, detach_confidence=detach)


@pytest.fixture(scope="module", params=["sparse", "dense"])
def case(request) -> Case:
    return Case(request.param)


def test_golden_backbone(case: Case) -> None:
    case.check("final_hidden", case.features.hidden, STATE)
    case.check("logits", case.drafter.backbone.head(case.features.hidden), STATE)
    case.check("main_hidden", case.features.entering, STATE)
    case.check("main_x", case.drafted.main_x, 1e-4)


def test_golden_keys_and_what_is_seen(case: Case) -> None:
    """Rounded keys are equal; the stages' keys come behind those of the backbone's eight layers."""
    keys = case.keys[8:]
    for stage in range(3):
        assert torch.equal(keys[stage], case.expected[f"stage.{stage}.context_keys"])
        assert torch.equal(keys[3 + stage].view(9, 5, -1), case.expected[f"stage.{stage}.block_keys"])
    layout = case.features.layout
    where = case.drafter.locate(case.inputs["anchors"], layout, (1, 60))
    layout = case.drafter.draft_layout(where, layout)
    seen = torch.zeros(9, 61, dtype=torch.bool).scatter(1, layout.places.masked_fill(layout.hidden, 60), True)[:, :60]
    assert torch.equal(seen, case.expected["context_visible"])


def test_golden_stages(case: Case) -> None:
    for stage, (state, routing, _) in enumerate(case.stages):
        case.check(f"stage.{stage}.streams", state.streams.unflatten(0, (9, 5)), STATE)
        case.check(f"stage.{stage}.pre", state.pre_mix.unflatten(0, (9, 5)), STATE)
        indices, order = routing.indices.unflatten(0, (9, 5)).sort(-1)
        theirs, their_order = case.expected[f"stage.{stage}.router_indices"].long().sort(-1)
        assert torch.equal(indices, theirs)
        weights = routing.weights.unflatten(0, (9, 5)).gather(-1, order)
        assert (weights - case.expected[f"stage.{stage}.router_weights"].gather(-1, their_order)).abs().max() <= 1e-4


def test_golden_drafts(case: Case) -> None:
    for name, ours in (
        ("hidden", case.drafted.hidden),
        ("base_logits", case.drafted.base_logits),
        ("teacher.logits", case.drafted.logits),
        ("teacher.confidence", case.drafted.confidence),
        ("greedy.logits", case.draft.logits),
        ("greedy.confidence", case.draft.confidence),
    ):
        case.check(name, ours, STATE)
    assert torch.equal(case.draft.tokens, case.expected["greedy.tokens"])


@pytest.mark.parametrize("detach", [False, True])
def test_golden_loss_and_gradients(case: Case, detach: bool) -> None:
    result = case.loss(detach)
    case.check("loss", result.loss[None], 1e-5)
    case.check("loss.terms", torch.stack([result.ce, result.l1, result.bce]), 1e-5)
    case.check("loss.tau", result.tau[None], 1e-4)
    assert torch.equal(result.valid, case.expected["loss.valid"])
    case.check("loss.weights", result.weights, 1e-6)
    case.check("loss.confidence", result.confidence, STATE)
    assert ((result.alpha - case.expected["loss.alpha"]) * result.valid).abs().max() <= 1e-4
    assert torch.equal(result.alpha == 0, ~result.valid)
    result.loss.backward()
    ours: dict[str, Tensor] = {}
    for name, gradient in gradients(case.drafter).items():
        names = released_names(name, gradient.shape)
        ours.update(zip(names, gradient if len(names) > 1 else [gradient], strict=True))
    prefix = "grad_detached." if detach else "grad."
    theirs = {name.removeprefix(prefix): t for name, t in case.expected.items() if name.startswith(prefix)}
    assert len(theirs) >= 5
    assert_same({name: ours[name] for name in theirs}, theirs, 1e-3)
    assert all(p.grad is None for p in case.drafter.backbone.parameters())


def batch(lengths: list[list[int]], seed: int = 0, width: int = 40) -> dict[str, Tensor]:
    """Rows of packed documents, padding behind; some labels are missing."""
    ids = tokens(len(lengths), width, seed=seed)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.1, -100)
    most = max(map(len, lengths))
    return {
        "input_ids": ids,
        "labels": labels,
        "seq_lens": torch.tensor([row + [0] * (most - len(row)) for row in lengths]),
    }


ANCHORS = torch.tensor([[1, 2, 11, 12, 14, 20, 30], [5, 9, 10, 17, 18, -1, -1]])  # 12 and 18 end a document
LENGTHS = [[12, 23], [18]]


def drafts(drafter: Drafter, data: dict[str, Tensor], anchors: Tensor) -> dict[str, Tensor]:
    """Everything a drafter computes for a batch, gradients included."""
    ids, first = data["input_ids"], (7 * anchors + 5) % 61
    extra = {name: tensor for name, tensor in data.items() if name not in ("input_ids", "labels")}
    before = torch.stack([first, *((first + k) % 61 for k in (9, 20))], dim=-1)
    with torch.no_grad():
        found = drafter(ids, anchors, first, before, **extra)._asdict()
    found |= {f"greedy.{name}": t for name, t in drafter.draft(ids, anchors, first, **extra)._asdict().items()}
    drafter.zero_grad()
    loss = drafter.loss(ids, data["labels"], anchors, detach_confidence=False, **extra)
    loss.loss.backward()
    found |= {f"loss.{name}": t.detach() for name, t in loss._asdict().items()}
    return found | {f"grad.{name}": t for name, t in gradients(drafter).items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    floating = {name: t for name, t in ours.items() if t.is_floating_point()}
    assert_same(floating, {name: theirs[name] for name in floating}, tolerance)
    for name in ours.keys() - floating.keys():
        assert torch.equal(ours[name], theirs[name]), name


def test_plain_equals_batched(no_rounding, monkeypatch) -> None:  # noqa: F811
    """Also where the batched path cuts its blocks into chunks."""
    plain = drafts(tiny_drafter(ForwardOptions(attention="dense")), batch(LENGTHS), ANCHORS)
    same(drafts(tiny_drafter(), batch(LENGTHS), ANCHORS), plain)
    monkeypatch.setitem(model.sparse.CHUNK_ELEMENTS, "cpu", 500)
    same(drafts(tiny_drafter(), batch(LENGTHS), ANCHORS), plain)
    same(drafts(tiny_drafter(ForwardOptions(recompute=True)), batch(LENGTHS), ANCHORS), plain)


def test_each_anchor_alone_equals_all_together(no_rounding) -> None:  # noqa: F811
    drafter, data = tiny_drafter(), batch([[35]])
    anchors = torch.tensor([1, 2, 6, 7, 33, 35])
    together = drafts(drafter, data, anchors)
    for i, anchor in enumerate(anchors):
        alone = drafts(drafter, data, anchor[None])
        for name in ("hidden", "base_logits", "logits", "confidence", "greedy.tokens", "greedy.logits", "loss.alpha"):
            torch.testing.assert_close(alone[name][0], together[name][i], atol=1e-5, rtol=1e-5, msg=f"{anchor} {name}")


def test_packed_documents_equal_documents_alone(no_rounding) -> None:  # noqa: F811
    """Engram and bounded replay included; anchors of a document are counted from its start when it is alone."""
    drafter = tiny_drafter(ForwardOptions(decoder_replay=True), engram=True)
    data = batch(LENGTHS)
    packed = drafts(drafter, data, ANCHORS)
    flat = {name: packed[name].flatten(0, 1) for name in ("hidden", "logits", "greedy.tokens", "loss.alpha")}
    sums = {name: 0.0 for name in packed if name.startswith("grad.")}
    total = packed["loss.weights"].sum()
    for row, start, length in ((0, 0, 12), (0, 12, 23), (1, 0, 18)):
        mine = (ANCHORS[row] > start) & (ANCHORS[row] <= start + length)
        cut = {name: data[name][row : row + 1, start : start + length] for name in ("input_ids", "labels")}
        anchors = ANCHORS[row][mine] - start
        # the same anchor tokens as in the packed row
        drafter_alone = drafts(drafter, cut, anchors)
        wanted = mine.nonzero().flatten() + row * ANCHORS.shape[1]
        for name in ("loss.alpha", "loss.valid", "loss.weights", "loss.confidence"):
            torch.testing.assert_close(
                drafter_alone[name], packed[name].flatten(0, 1)[wanted], atol=1e-5, rtol=1e-5, msg=name
            )
        first = (7 * ANCHORS[row][mine] + 5) % 61
        before = torch.stack([first, *((first + k) % 61 for k in (9, 20))], dim=-1)
        with torch.no_grad():
            alone = drafter(cut["input_ids"], anchors, first, before)
        for name in ("hidden", "logits"):
            torch.testing.assert_close(getattr(alone, name), flat[name][wanted], atol=1e-5, rtol=1e-5, msg=name)
        assert torch.equal(drafter.draft(cut["input_ids"], anchors, first).tokens, flat["greedy.tokens"][wanted])
        for name in sums:
            sums[name] = sums[name] + drafter_alone[name] * drafter_alone["loss.weights"].sum() / total
    assert_same(sums, {name: packed[name] for name in sums}, 1e-4)


def test_a_document_ends_its_blocks() -> None:
    """Anchor 11 of a document of 12 has one token ahead and 12 none; 10 of 18 has all."""
    result = tiny_drafter().loss(anchors=ANCHORS, **batch(LENGTHS))
    labels = batch(LENGTHS)["labels"]
    assert not result.valid[0, 2].any() and not result.valid[0, 3].any() and not result.valid[1, 5:].any()
    for row, column, end in ((0, 4, 35), (0, 6, 35), (1, 0, 18), (1, 3, 18)):
        at = int(ANCHORS[row, column])
        ahead = [at + 1 + i < end and int(labels[row, at + 1 + i]) >= 0 for i in range(3)]
        assert result.valid[row, column].tolist() == [all(ahead[: i + 1]) for i in range(3)]


def test_no_supervised_slot_is_no_loss() -> None:
    drafter, data = tiny_drafter(), batch([[35]])
    data["labels"][:] = -100
    for anchors in (torch.tensor([3, 9]), torch.tensor([-1])):
        result = drafter.loss(anchors=anchors, **data)
        result.loss.backward()
        assert result.loss == 0 and not any(p.grad is not None and p.grad.any() for p in drafter.parameters())


def test_losses_of_micro_batches_are_those_of_the_larger_batch() -> None:
    """Divided by common denominators they and their gradients add up, whatever the weights of the terms."""
    drafter, data = tiny_drafter(), batch(LENGTHS)
    expected = drafter.loss(anchors=ANCHORS, **data)
    expected.loss.backward()
    wanted = gradients(drafter)
    parts = [{name: t[row : row + 1] for name, t in {**data, "anchors": ANCHORS}.items()} for row in range(2)]
    denominators = DraftDenominators.from_tensor(sum(drafter.loss_denominators(**part).to_tensor() for part in parts))
    assert denominators.num_tokens == 53 and torch.equal(denominators.valid, expected.valid.sum((0, 1)))
    drafter.zero_grad()
    found = [drafter.losses(**part, denominators=denominators) for part in parts]
    sum(losses.total for losses in found).backward()
    assert_same(gradients(drafter), wanted, 1e-5)
    sums = {name: sum(getattr(losses, name) for losses in found) for name in found[0]._fields}
    blocks, slots = denominators.valid[0], denominators.valid.sum()
    assert torch.equal(sums["slots"], denominators.valid)
    torch.testing.assert_close(sums["total"], expected.loss)
    torch.testing.assert_close(sums["accepted_sum"] / blocks, expected.tau)
    torch.testing.assert_close(sums["alpha_sum"], expected.alpha.sum((0, 1)))
    assert torch.equal(sums["expert_load"], expected.expert_load)
    assert sums["calibration"][:, 0].sum() == slots
    sure = expected.confidence[expected.valid].sigmoid()
    low = (sure >= 0.3) & (sure < 0.4)
    row = torch.stack([low.sum(), sure[low].sum(), expected.alpha[expected.valid][low].sum()]).double()
    torch.testing.assert_close(sums["calibration"][3], row, atol=1e-5, rtol=1e-5)
    other = DraftObjective(ce=0.5, l1=0.0, confidence=2.0)
    total = sum(drafter.losses(**part, denominators=denominators, objective=other).total for part in parts)
    torch.testing.assert_close(total, 0.5 * expected.ce + 2 * expected.bce)


def test_bad_anchors_are_refused() -> None:
    drafter, data = tiny_drafter(), batch(LENGTHS)
    for anchors, message in (
        (torch.tensor([3, 4]), r"anchors must be \[2, anchors\], got \[2\]"),
        (torch.tensor([[3], [0]]), "anchors: 0 has no token before it"),
        (torch.tensor([[3], [19]]), "anchors: 19 has no token before it"),  # padding is there
        (torch.tensor([[41], [3]]), "anchors: 41 has no token before it"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter.loss(anchors=anchors, **data)


def test_features_are_behind_engram() -> None:
    """Layer 4 has an Engram and is read: what its attention gets is the mean of the streams behind it."""
    drafter = tiny_drafter(engram=True)
    built, ids, seen = drafter.backbone, tokens(1, 20), []
    hook = built.layers[4].engram.register_forward_hook(lambda module, _, out: seen.append(out))
    entering = built.features((2, 4, 5), ids).entering
    hook.remove()
    streams = built(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([streams[2][0].mean(1), seen[0].mean(1), streams[5][0].mean(1)], dim=-1)
    assert torch.equal(entering, expected) and not torch.allclose(seen[0], streams[4][0])


def test_drafts_behind_images_are_routed_as_text() -> None:
    data = image_batch(length=60)
    drafter = tiny_drafter(vision=True)
    anchors = torch.tensor([4, 20, 50])
    expected = drafter.loss(anchors=anchors, **data)
    for _, bias_vl in drafter.router_biases():
        bias_vl.normal_()
    assert torch.equal(drafter.loss(anchors=anchors, **data).alpha, expected.alpha)
    load = expected.expert_load
    assert load[:, 0].sum(-1).tolist() == [3 * 3 * 3] * 2 and not load[:, 1].any()


def test_bf16() -> None:
    """Autocast: finite, near fp32, and the coefficients and heads stay in fp32."""
    drafter, data = tiny_drafter(), batch(LENGTHS)
    exact = drafter.loss(anchors=ANCHORS, **data)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter.loss(anchors=ANCHORS, **data)
    rounded.loss.backward()
    assert rounded.confidence.dtype == rounded.alpha.dtype == torch.float32
    assert abs(rounded.loss - exact.loss) <= 0.05 * exact.loss
    assert all(p.grad.isfinite().all() for p in drafter.parameters())


def test_distances_of_the_distributions() -> None:
    """Values against softmax, gradients by finite differences; chunks change nothing."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, embedded, markov, teacher = random(5, 4), random(9, 4), random(5, 3), random(9, 3), random(5, 4)
    targets = torch.tensor([0, 8, 3, 3, 1])
    q = (hidden @ weight.t() + embedded @ markov.t()).softmax(-1)
    nll, distance = draft_distances(hidden, weight, embedded, markov, teacher, targets)
    torch.testing.assert_close(nll, -q[torch.arange(5), targets].log())
    torch.testing.assert_close(distance, (q - (teacher @ weight.t()).softmax(-1)).abs().sum(-1))
    inputs = [x.requires_grad_() for x in (hidden, embedded, markov)]
    for chunk in (2**21, 18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(model.loss.CHUNK_LOGITS, "cpu", chunk)
            assert torch.autograd.gradcheck(
                lambda h, e, m: draft_distances(h, weight, e, m, teacher, targets), inputs, atol=1e-7
            )


# --- folders


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Drafter, Path]:
    """A drafter and the folder that holds `plain`, `bf16` and `released` of it with its backbone."""
    folder = tmp_path_factory.mktemp("drafter")
    drafter = tiny_drafter(hidden_size=64, moe_intermediate_size=32)
    save_pretrained(drafter.backbone, folder / "plain", drafter=drafter)
    save_pretrained(drafter.backbone, folder / "bf16", dtype=torch.bfloat16, drafter=drafter)
    save_pretrained(drafter.backbone, folder / "released", format="released", dtype=torch.bfloat16, drafter=drafter)
    return drafter, folder


def test_names_and_types_are_the_released_ones(written) -> None:
    _, folder = written
    stored = {name: (t.dtype, list(t.shape)) for name, t in tensors_of(folder / "released").items()}
    assert {name: stored[name] for name in stored if name.startswith("mtp.1") and ".experts." not in name}.keys() >= {
        *(f"mtp.1.attn.{n}.weight" for n in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")),
        *("mtp.1.attn.attn_sink", "mtp.1.attn_norm.weight", "mtp.1.ffn_norm.weight", "mtp.1.norm.weight"),
        *(f"mtp.1.hc_{part}_{n}" for part in ("attn", "ffn") for n in ("fn", "base", "scale")),
        *("mtp.1.ffn.gate.weight", "mtp.1.ffn.gate.bias", "mtp.1.ffn.gate.bias_vl"),
        *("mtp.1.markov_head.embed.weight", "mtp.1.markov_head.head.weight", "mtp.1.confidence_head.proj.weight"),
    }
    for name, dtype, shape in (
        ("mtp.0.main_proj.weight", torch.float8_e4m3fn, [64, 192]),
        ("mtp.0.main_proj.scale", torch.float8_e8m0fnu, [2, 6]),
        ("mtp.0.main_norm.weight", torch.float32, [64]),
        ("mtp.1.ffn.experts.5.w2.weight", torch.int8, [64, 16]),
        ("mtp.1.ffn.experts.5.w2.scale", torch.float8_e8m0fnu, [64, 1]),
        ("mtp.1.confidence_head.proj.weight", torch.bfloat16, [1, 70]),
        ("mtp.1.markov_head.head.weight", torch.bfloat16, [61, 6]),
        ("mtp.0.hc_attn_fn", torch.float32, [24, 256]),
    ):
        assert stored[name] == (dtype, shape), name
    assert not any(name.startswith(("mtp.0.norm", "mtp.1.main", "mtp.0.markov", "mtp.2")) for name in stored)


def test_the_golden_folder_is_written_as_it_was_read(tmp_path: Path) -> None:
    drafter = Case("sparse").drafter
    save_pretrained(drafter.backbone, tmp_path / "m", drafter=drafter)
    ours, theirs = tensors_of(tmp_path / "m"), load_file(golden("dspark") / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(raw(ours[name]), raw(tensor)) for name, tensor in theirs.items())


def test_written_and_read(written, tmp_path: Path) -> None:
    """fp32: the same; quantised: the same bytes again; through bf16 and back: the same bytes."""
    drafter, folder = written
    back = load_drafter(folder / "plain", load_pretrained(folder / "plain"))
    assert all(torch.equal(t, back.state_dict()[name]) for name, t in drafter.state_dict().items())
    read = load_drafter(folder / "released", load_pretrained(folder / "released"))
    assert not torch.equal(read.mtp[0].main_proj.weight, drafter.mtp[0].main_proj.weight)
    released = tensors_of(folder / "released")
    save_pretrained(read.backbone, tmp_path / "again", format="released", dtype=torch.bfloat16, drafter=read)
    save_pretrained(read.backbone, tmp_path / "plain", drafter=read)
    through = load_drafter(tmp_path / "plain", load_pretrained(tmp_path / "plain"))
    save_pretrained(through.backbone, tmp_path / "through", format="released", dtype=torch.bfloat16, drafter=through)
    convert_checkpoint(folder / "released", tmp_path / "converted", "bf16")
    convert_checkpoint(tmp_path / "converted", tmp_path / "back", "released")
    for name in ("again", "through", "back"):
        found = tensors_of(tmp_path / name)
        assert found.keys() == released.keys()
        different = [n for n, t in released.items() if not torch.equal(raw(t), raw(found[n]))]
        assert not different, (name, different)
    assert json.loads((folder / "plain" / "config.json").read_text())["text_config"]["dspark_block_size"] == 3


def test_merged_like_the_rest(written, tmp_path: Path) -> None:
    drafter, folder = written
    other = tiny_drafter(seed=5, hidden_size=64, moe_intermediate_size=32)
    save_pretrained(other.backbone, tmp_path / "other", drafter=other)
    with open_folder(folder / "plain") as a, open_folder(tmp_path / "other") as b:
        merge_checkpoints([a, b], [0.25, 0.75], drafter.config, tmp_path / "merged")
    merged = load_drafter(tmp_path / "merged", load_pretrained(tmp_path / "merged")).state_dict()
    for name, tensor in drafter.state_dict().items():
        wanted = tensor.double() * 0.25 + other.state_dict()[name].double() * 0.75
        assert torch.equal(merged[name], wanted.float()), name


REFUSED = [
    (lambda t: t.pop("mtp.1.confidence_head.proj.weight"), r"missing: mtp.1.confidence_head.proj.weight \[1, 70\]"),
    (lambda t: t.update({"mtp.2.norm.weight": torch.ones(64)}), "extra: mtp.2.norm.weight"),
    (lambda t: t.update({"mtp.0.main_norm.weight": torch.ones(3)}), "shape: mtp.0.main_norm.weight"),
    (lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")], "contains no drafter"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_a_folder_that_does_not_fit_is_refused(written, tmp_path: Path, change, message: str) -> None:
    drafter, folder = written
    tensors = tensors_of(folder / "plain")
    change(tensors)
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_bytes((folder / "plain" / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "m", drafter.backbone)


def test_a_configuration_without_a_drafter_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        build_drafter(tiny_model(num_nextn_predict_layers=0, dspark_target_layer_ids=[6], dspark_noise_token_id=61))
    for key in ("num_nextn_predict_layers: is 0", "layer 6 is out of range 0..5", "dspark_noise_token_id: is 61"):
        assert f"text_config.{key}" in str(error.value) or key in str(error.value)


def test_a_model_in_memory_takes_the_drafter_of_its_export(tmp_path: Path) -> None:
    """The export spells out the sizes of the Engram tables."""
    drafter = tiny_drafter(engram=True)
    save_pretrained(drafter.backbone, tmp_path / "m", drafter=drafter)
    back = load_drafter(tmp_path / "m", drafter.backbone)
    assert all(torch.equal(t, back.state_dict()[name]) for name, t in drafter.state_dict().items())


def test_another_backbone_is_refused(written) -> None:
    _, folder = written
    with pytest.raises(ValueError, match="differs from that of the backbone"):
        load_drafter(folder / "plain", tiny_model(**DRAFTER))


def test_initial_weights_are_drawn_from_the_seed() -> None:
    backbone = tiny_model(**DRAFTER)
    first, again, other = (build_drafter(backbone, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(t, again[name]) for name, t in first.items())
    assert not torch.equal(first["mtp.0.main_proj.weight"], other["mtp.0.main_proj.weight"])
    assert (first["mtp.1.norm.weight"] == 1).all() and 0.01 < first["mtp.1.markov_head.head.weight"].std() < 0.03


def test_released_sizes() -> None:
    """14.2 B parameters, 13.6 B of them experts."""
    counts = count.parameters(build_drafter(build_model(ModelConfig(), device="meta")))
    assert round(sum(counts.values()) / 1e9, 1) == 14.2
    assert counts["routed experts"] == 3 * 128 * 3 * 2304 * 5120 == 13_589_544_960
    assert counts["drafter heads"] == 3 * 5120 * 5120 + 2 * 129280 * 256 + 5120 + 256


# --- several processes


def steps(drafter: Drafter, rank: int, total: float) -> dict:
    """Forward and backward of a rank's batch, its share of all ranks' loss. Rank 1 has no anchor in its first."""
    results, losses = [], []
    for seed in range(2):
        anchors = torch.tensor([[-1]]) if (rank, seed) == (1, 0) else torch.tensor([[3, 9, 10 + rank]])
        result = drafter.loss(anchors=anchors, **batch([[14 + rank]], seed=10 * rank + seed, width=16))
        losses.append(result.loss * result.weights.sum() / total)
        results.append({"loss": losses[-1].detach(), "alpha": result.alpha, "load": result.expert_load})
    for loss in losses:
        loss.backward()
    return {"results": results, "gradients": {name: p.grad for name, p in drafter.named_parameters()}}


def on_a_rank(rank: int, total: float, folder: Path) -> dict:
    switch_rounding_off(setattr)
    ranks = ranks_of(2)
    backbone = load_pretrained(folder, parallel=Parallel(ranks, ranks, shard_embeddings=True))
    drafter = load_drafter(folder, backbone)
    places = {n: (p.shard.start, p.shard.stop) for n, p in drafter.named_parameters() if hasattr(p, "shard")}
    found = {**steps(drafter, rank, total), "places": places}
    save_pretrained(backbone, folder.with_name("together"), drafter=drafter, ranks=ranks)
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_experts_on_two_processes_equal_one(tmp_path: Path, no_rounding) -> None:  # noqa: F811
    """Losses, loads, gradients and the folder that both write."""
    whole = tiny_drafter()
    save_pretrained(whole.backbone, tmp_path / "m", drafter=whole)
    expected = []
    for rank in range(2):
        whole.zero_grad()
        expected.append(steps(whole, rank, 7.0))
    found = processes.run(2, on_a_rank, 7.0, tmp_path / "m")
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours["results"], theirs["results"], strict=True):
            assert_same({k: a[k] for k in ("loss", "alpha")}, {k: b[k] for k in ("loss", "alpha")}, 1e-5)
            assert torch.equal(a["load"], b["load"])
    split = {count.part_of(name) for result in found for name in result["places"]}
    assert split == {"routed experts"}
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    ours, theirs = (assembled(results, shapes) for results in (found, expected))
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], **NOISE, msg=lambda text, name=name: f"{name}: {text}")
    together, alone = tensors_of(tmp_path / "together"), tensors_of(tmp_path / "m")
    assert together.keys() == alone.keys() and all(torch.equal(t, together[name]) for name, t in alone.items())
