"""Folders of images with captions in text files beside them."""

from pathlib import Path

from PIL import Image

from data import DataConfig, build_loaders
from data.errors import BadRecordPolicy
from data.images import VisionSettings
from data.open import open_sources


def test_a_folder_of_images_with_captions_beside_them(tmp_path, tokenizer):
    for number in range(12):
        Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(tmp_path / f"page{number}.{'jpg' if number % 2 else 'png'}")
        (tmp_path / f"page{number}.txt").write_text(f"Page {number}.")
    cfg = DataConfig(source="image_folder", paths=[str(tmp_path)], window_tokens=1000, validation_share=0.3)
    train, held_out = open_sources(cfg)
    found = [[d for d, _ in source.read(BadRecordPolicy("stop"))] for source in (train, held_out)]
    assert sorted(d.text for part in found for d in part) == sorted(f"Page {n}." for n in range(12)) and all(found)
    for document in found[0]:
        picture, caption = document.parts
        assert document.file == picture.key and Path(document.file).with_suffix(".txt").read_text() == caption
    known = train.identity()
    batch = next(build_loaders(cfg, tokenizer, seq_len=64, batch_rows=1, vision=vars(VisionSettings(4, 2, 40, 64)))[0])
    assert len(batch["image_grid_hws"]) >= 2
    (tmp_path / "page3.txt").write_text("Another caption.")
    assert open_sources(cfg)[0].identity() != known

    (tmp_path / "page5.txt").unlink()
    policy = BadRecordPolicy("skip")
    assert sum(1 for source in open_sources(cfg) for _ in source.read(policy)) == 11
    assert set(policy.skipped) == {"image without a caption"}
