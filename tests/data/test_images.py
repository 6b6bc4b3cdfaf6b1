import base64
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, PngImagePlugin
from safetensors.torch import load_file

from data import DataConfig, DataError, build_loaders, special_ids
from data.errors import BadRecordPolicy
from data.files import find_files
from data.images import END, IMAGE, NEWLINE, START, VisionSettings, load_picture, open_picture, plan_grid, preprocess
from data.sources import ImageTextLines

GOLDEN = Path(__file__).parents[1] / "golden"
# The settings under which tests/golden/vision_pre/images.safetensors was made, and the step of its stored patches.
CASES = {
    "prod_120x90": (VisionSettings(), 8),
    "tiny_26x18": (VisionSettings(4, 3, 1024, 512), 1),
    "tiny_budget_200x50": (VisionSettings(4, 3, 24, 1), 1),
    "tiny_ratio_90x12": (VisionSettings(4, 2, 1024, 1, max_wh_ratio=3), 1),
}


def test_every_grid_of_the_golden_tables_is_exact():
    table = json.loads((GOLDEN / "vision_pre" / "grid_table.json").read_text())
    assert len(table) == 150
    for row in table:
        vision = VisionSettings(
            row["patch"], row["down"], row["max_image_tokens"], row["min_pixels"], row["max_wh_ratio"]
        )
        grid = plan_grid(row["width"], row["height"], vision)
        assert [*grid.pixels, *grid.patches, *grid.tokens] == row["grid"], row
        assert grid.num_tokens <= row["max_image_tokens"]
    for row in json.loads((GOLDEN / "image_grid.json").read_text()):
        grid = plan_grid(row["width"], row["height"], VisionSettings())
        assert [*grid.pixels[::-1]] == row["resized"], row
        assert [*grid.patches] == row["vit"] and [*grid.tokens] == row["llm"] and grid.num_tokens == row["tokens"], row


@pytest.mark.parametrize("name", CASES)
def test_patches_and_token_types_equal_the_golden_ones(name):
    golden = load_file(GOLDEN / "vision_pre" / "images.safetensors")
    vision, step = CASES[name]
    patches, grid = preprocess(Image.fromarray(golden[f"{name}.rgb"].numpy()), vision)
    assert [*grid.pixels, *grid.patches, *grid.tokens] == golden[f"{name}.grid"].tolist()
    assert patches.dtype == torch.float32 and patches.shape[0] == grid.patches[0] * grid.patches[1]
    assert torch.equal(patches[::step].bfloat16(), golden[f"{name}.patches"])
    assert grid.token_types().tolist() == golden[f"{name}.token_types"].tolist()


def test_the_token_budget_holds_for_every_size():
    for budget in (4, 5, 9, 40):
        for ratio in (1, 2, 3):
            vision = VisionSettings(4, ratio, budget, 64)
            for width in (1, 2, 7, 30, 100, 999):
                for height in (1, 3, 8, 31, 400):
                    grid = plan_grid(width, height, vision)
                    assert min(*grid.patches, *grid.tokens) >= 1
                    assert grid.num_tokens == len(grid.token_types()) <= budget, (width, height, vision)


def test_any_image_mode_becomes_rgb():
    for mode in ("L", "P", "RGBA", "1", "CMYK", "I;16"):
        patches, _ = preprocess(Image.new(mode, (20, 20)), VisionSettings(4, 2, 40, 64))
        assert patches.shape[1:] == (3, 4, 4) and patches.isfinite().all()


def test_settings_out_of_range_are_all_named():
    with pytest.raises(ValueError) as caught:
        VisionSettings.from_config({"patch_size": 0, "max_image_tokens": 3, "hidden_size": 8})
    assert "patch_size=0" in str(caught.value) and "max_image_tokens=3" in str(caught.value)


# Image + text records


def record(*parts):
    items = [{"type": "image", "image": p[1:]} if p.startswith("@") else {"type": "text", "text": p} for p in parts]
    return json.dumps({"content": items}) + "\n"


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in {"a.png": (20, 12), "b.png": (9, 30), "c.png": (16, 16)}.items():
        Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(tmp_path / name)
    (tmp_path / "train.jsonl").write_text(
        record("@a.png", "first") + record("before", "@b.png", "between", "@c.png", "after") + record("no image")
    )
    (tmp_path / "held.jsonl").write_text(record("@c.png", "held out é"))
    return tmp_path


def bomb(path):
    """A PNG whose few bytes say that it has 9,000 x 9,000 pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def test_images_that_cannot_be_used_are_refused_by_name_before_training(folder):
    (folder / "text.png").write_text("no image")
    bomb(folder / "bomb.png")
    reasons = {
        "text.png": "unknown image format",
        "bomb.png": "image is too large",
        "absent.png": "missing image",
        ".": "corrupt image",
    }
    for name, reason in reasons.items():
        (folder / "bad.jsonl").write_text(record("fine") + record(f"@{name}", "text"))
        source = ImageTextLines(find_files([str(folder / "bad.jsonl")], (".jsonl",)), "content")
        with pytest.raises(DataError) as caught:
            list(source.read(BadRecordPolicy("stop")))
        error = caught.value
        assert (error.file, error.line, error.reason) == (str(folder / "bad.jsonl"), 2, reason), name
        assert name in str(error) and "\n" not in str(error)
        policy = BadRecordPolicy("skip")
        assert len(list(source.read(policy))) == 1 and policy.skipped == {reason: 1}


def images(folder, name="train", **options):
    """Configuration of documents with images."""
    paths = {"paths": [str(folder / f"{name}.jsonl")], "validation_paths": [str(folder / "held.jsonl")]}
    cache = str(folder / ".cache")
    return DataConfig(source="image_text", field="content", cache_dir=cache, window_tokens=1000, **paths, **options)


SETTINGS = VisionSettings(4, 2, 40, 64)


def test_images_are_decoded_once_to_check_them_and_then_only_when_they_are_used(folder, tokenizer, monkeypatch):
    decoded = []

    def counted(picture, load=load_picture):
        decoded.append(picture.key)
        return load(picture)

    monkeypatch.setattr("data.tokens.load_picture", counted)
    monkeypatch.setattr("data.collate.load_picture", counted)
    cfg = images(folder)
    for expected in (4, 0):  # the cache keeps size and key
        train, _ = build_loaders(cfg, tokenizer, seq_len=160, batch_rows=2, vision=vars(SETTINGS))
        assert len(decoded) == expected
        batch = next(train)
        assert len(decoded) == expected + len(batch["image_grid_hws"])
        decoded.clear()


def test_images_that_came_as_bytes_are_kept_in_the_cache(folder, tokenizer, tmp_path):
    data = [(folder / f"{name}.png").read_bytes() for name in "ab"]
    encoded = [{"base64": base64.b64encode(one).decode()} for one in data]
    cfg = DataConfig(source="chat", field="messages", cache_dir=str(tmp_path / "cache"), validation_share=0.4)
    records = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]},
                      {"role": "assistant", "content": "yes"}]}
        for text, image in zip("abcdefgh", encoded * 4, strict=True)
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    cfg.paths = [str(tmp_path / "chats.jsonl")]
    found = []
    for _ in range(2):
        train, _ = build_loaders(cfg, tokenizer, seq_len=160, batch_rows=2, vision=vars(SETTINGS))
        found.append(next(train))
    assert torch.equal(found[0]["pixel_values"], found[1]["pixel_values"]) and len(found[0]["image_grid_hws"])
    expected = [preprocess(load_picture(open_picture(one, "", 0)), SETTINGS)[0] for one in data]
    count = int(found[0]["image_grid_hws"][0].prod())
    assert any(_equals(found[0]["pixel_values"][:count], one) for one in expected)


def test_a_damaged_image_stops_the_run_or_costs_its_document_the_labels(folder, tokenizer):
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:-200])
    (folder / "bad.jsonl").write_text(record("@cut.png", "text") + record("fine"))
    with pytest.raises(DataError, match="bad.jsonl:1: corrupt image: .*cut.png"):
        build_loaders(images(folder, "bad"), tokenizer, seq_len=160, batch_rows=1, vision=vars(SETTINGS))
    cfg = images(folder, "bad", on_error="skip")
    train, _ = build_loaders(cfg, tokenizer, seq_len=160, batch_rows=1, vision=vars(SETTINGS))
    assert train.stats.skipped == {"corrupt image": 1} and train.stats.documents == 1
    # A stream does not decode ahead: the image is found damaged when it is used.
    cfg.streaming, cfg.validation_rows, cfg.shuffle = True, 1, False
    train, _ = build_loaders(cfg, tokenizer, seq_len=160, batch_rows=1, vision=vars(SETTINGS))
    batch = next(train)
    first, second = batch["seq_lens"][0, :2].tolist()
    assert (batch["labels"][0, :first] == -100).all() and (batch["labels"][0, first + 1 : first + second] >= 0).all()
    assert batch["pixel_values"].abs().max() < 0.01 and train.collator.policy.skipped == {"corrupt image": 1}
    cfg.on_error = "stop"
    train, _ = build_loaders(cfg, tokenizer, seq_len=160, batch_rows=1, vision=vars(SETTINGS))
    with pytest.raises(DataError, match="bad.jsonl:1: corrupt image"):
        next(train)


def test_an_image_that_has_changed_since_it_was_tokenised_is_refused(folder):
    picture = open_picture(folder / "a.png", "f.jsonl", 3)
    Image.new("RGB", (9, 9)).save(folder / "a.png")
    with pytest.raises(DataError, match="f.jsonl:3: image has changed: .* has 9x9 pixels"):
        load_picture(picture)


def test_whatever_a_decoder_raises_names_the_image(folder, monkeypatch):
    def broken(*_):
        raise RuntimeError("no planes")  # as Pillow's reader of AVIF does

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(DataError, match=r"f.jsonl:3: corrupt image: .*a.png: no planes"):
        open_picture(folder / "a.png", "f.jsonl", 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("text", "field is not a list of parts"),
        ([], "field is not a list of parts"),
        (["text"], "part is neither text nor image"),
        ([{"type": "video", "video": "a"}], "part is neither text nor image"),
        ([{"type": "text", "image": "a"}], "part is neither text nor image"),
    ],
)
def test_malformed_parts_are_refused(folder, content, reason):
    (folder / "bad.jsonl").write_text(json.dumps({"content": content}))
    source = ImageTextLines(find_files([str(folder / "bad.jsonl")], (".jsonl",)), "content")
    with pytest.raises(DataError) as caught:
        list(source.read(BadRecordPolicy("stop")))
    assert caught.value.reason == reason and caught.value.line == 1


def test_a_batch_carries_its_images_in_order(folder, tokenizer):
    vision = VisionSettings(4, 2, 40, 64)
    cfg = DataConfig(
        source="image_text",
        field="content",
        paths=[str(folder / "train.jsonl")],
        validation_paths=[str(folder / "held.jsonl")],
        window_tokens=1000,
    )
    train, valid = build_loaders(cfg, tokenizer, seq_len=160, batch_rows=2, vision=vars(vision))
    special = special_ids(tokenizer)
    batch = next(train)
    types, ids, labels = batch["vision_token_types"], batch["input_ids"], batch["labels"]
    assert torch.equal(types >= 0, ids == special.image)
    assert (labels[types >= 0] == -100).all() and (labels != -100).any()
    assert batch["pixel_values"].shape[0] == int(batch["image_grid_hws"].prod(1).sum())

    files = {"a.png": "first", "b.png": "before", "c.png": "between"}  # each image and the text nearest to it
    at = 0
    images = [(row, start) for row in range(len(ids)) for start in np.flatnonzero(types[row] == START)]
    assert len(images) >= 3
    for (row, start), (h, w) in zip(images, batch["image_grid_hws"].tolist(), strict=True):
        pixels = batch["pixel_values"][at : at + h * w]
        at += h * w
        matches = [name for name in files if _equals(preprocess(Image.open(folder / name), vision)[0], pixels)]
        assert len(matches) == 1
        span = types[row, start : start + 2 + -(-h // 2) * (-(-w // 2) + 1)].tolist()
        assert span == [START, *([IMAGE] * -(-w // 2) + [NEWLINE]) * -(-h // 2), END]
        text = files[matches[0]]
        shown = tokenizer.encode(text, add_special_tokens=False).ids
        near = ids[row, start + len(span) :] if text == "first" else ids[row, start - len(shown) :]
        assert near[: len(shown)].tolist() == shown
    assert valid.target_bytes == len("held out é".encode())
    assert valid.target_tokens == int(sum((b["labels"] != -100).sum() for b in valid))


def _equals(a, b):
    return a.shape == b.shape and torch.equal(a, b)


def test_a_document_whose_image_does_not_fit_a_row_is_refused(folder, tokenizer):
    cfg = DataConfig(source="image_text", field="content", paths=[str(folder / "train.jsonl")], window_tokens=1000)
    with pytest.raises(DataError, match="train.jsonl:2: image document longer than a row"):
        build_loaders(cfg, tokenizer, seq_len=16, batch_rows=1, vision=vars(VisionSettings(4, 2, 40, 64)))


# What a viewer shows is what is trained on: every way in which a file's pixel values are not its picture.


def shown(image, format="PNG", **options):
    """The picture of a saved file, as the loaders see it: uint8 [height, width, 3]."""
    data = io.BytesIO()
    image.save(data, format, **options)
    picture = open_picture(data.getvalue(), "f.jsonl", 1)
    pixels = np.array(load_picture(picture))
    assert pixels.shape == (picture.height, picture.width, 3)  # the span is planned from these
    return pixels


def logo(mode):
    """A black bar, 3 columns wide, on 7 transparent columns. What is transparent has black pixel values too."""
    image = Image.new("RGBA", (10, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 3, 4))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("image", "format", "options"),
    [
        (logo("RGBA"), "PNG", {}),
        (logo("RGBA"), "WEBP", {"lossless": True}),
        (logo("RGBA"), "TIFF", {}),
        (logo("LA"), "PNG", {}),
        (logo("RGBA").quantize(4), "PNG", {}),  # a palette with an alpha value for each colour
        (logo("RGBA"), "GIF", {}),
        (Image.fromarray(np.repeat([[9] * 3 + [77] * 7], 4, 0).astype(np.uint8)), "PNG", {"transparency": 77}),
        (Image.fromarray(np.repeat([[9] * 3 + [77] * 7], 4, 0).astype(np.uint16)), "PNG", {"transparency": 77}),
        (
            Image.fromarray(np.tile(np.array([[9] * 3 + [77] * 7], np.uint8)[..., None], (4, 1, 3))),
            "PNG",
            {"transparency": (77, 77, 77)},
        ),
    ],
    ids=["rgba", "webp", "tiff", "grey-alpha", "palette", "gif", "grey-key", "grey16-key", "rgb-key"],
)
def test_transparency_shows_white(image, format, options):
    pixels = shown(image, format, **options)
    assert pixels[:, :3].max() < 10 and pixels[:, 3:].min() == 255


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_shades(format):
    ramp = np.linspace(0, 65535, 16).astype(np.uint16).reshape(1, 16)
    pixels = shown(Image.fromarray(ramp), format)
    assert np.array_equal(pixels[0, :, 0], np.round(np.linspace(0, 255, 16)))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_applied(format, orientation):
    """The saved pixels are turned so that, with the tag applied, the white corner is the upper left one."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = Image.new("RGB", (32, 16))
    image.paste((255, 255, 255), (0, 0, 16, 8))
    if orientation > 1:
        image = image.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = shown(image, format, exif=exif)
    assert pixels.shape == (16, 32, 3)
    assert pixels[:7, :15].min() > 200 and pixels[:, 17:].max() < 60 and pixels[9:].max() < 60


def test_colour_spaces_and_profiles():
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    assert np.abs(shown(red.convert("CMYK"), "TIFF").astype(int) - [255, 0, 0]).max() <= 1
    assert np.abs(shown(red.convert("CMYK"), "JPEG", quality=100).astype(int) - [255, 0, 0]).max() <= 4
    lab = ImageCms.profileToProfile(
        red, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert np.abs(shown(lab, "TIFF").astype(int) - [255, 0, 0]).max() <= 6  # eight bits of a wider space
    # A profile in which the first channel is green light: its red and green primaries have changed places.
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = profile.replace(b"sRGB", b"ours").replace(b"s\0R\0G\0B", b"o\0u\0r\0s")
    swapped = swapped.replace(b"rXYZ", b"-XYZ").replace(b"gXYZ", b"rXYZ").replace(b"-XYZ", b"gXYZ")
    assert np.abs(shown(red, "PNG", icc_profile=swapped).astype(int) - [0, 255, 0]).max() <= 4
    assert np.array_equal(shown(red, "PNG", icc_profile=profile)[0, 0], [255, 0, 0])  # sRGB: untouched
    assert np.array_equal(shown(red, "PNG", icc_profile=b"not a profile")[0, 0], [255, 0, 0])


def test_the_gamma_of_a_png_is_applied():
    grey = Image.new("RGB", (8, 8), (128, 128, 128))
    for gamma, expected in ((45455, 128), (100000, 186)):  # 0.45455: as the display; 1.0: linear light
        info = PngImagePlugin.PngInfo()
        info.add(b"gAMA", gamma.to_bytes(4, "big"))
        assert shown(grey, "PNG", pnginfo=info)[0, 0, 0] == expected


@pytest.mark.parametrize(
    ("image", "format", "options"),
    [
        (Image.new("L", (8, 8)), "GIF", {"save_all": True, "append_images": [Image.new("L", (8, 8), 200)]}),
        (Image.new("L", (8, 8)), "PNG", {"save_all": True, "append_images": [Image.new("L", (8, 8), 200)]}),
        (Image.new("L", (8, 8)), "WEBP", {"save_all": True, "append_images": [Image.new("L", (8, 8), 200)]}),
        (Image.new("L", (8, 8)), "TIFF", {"save_all": True, "append_images": [Image.new("L", (8, 8), 200)]}),
        (Image.new("F", (8, 8), 0.5), "TIFF", {}),
        (Image.new("I", (8, 8), 2**30), "TIFF", {}),
    ],
    ids=["gif", "apng", "webp", "pages", "float", "32-bit"],
)
def test_a_file_that_is_not_one_picture_is_refused(image, format, options):
    with pytest.raises(DataError, match=r"f.jsonl:1: image is not one picture: .*(frames or|is not defined)"):
        shown(image, format, **options)
