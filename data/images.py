"""Turns images into patches and spans of image tokens, exactly as the released image processor does (V4.1 report,
vision section).

An image is resized without changing its aspect ratio, padded with grey (127) to whole patches, scaled to [-1, 1] and
cut into patches in reading order. In the token sequence, an image is one START token, then the rows of its token grid
(IMAGE tokens followed by one NEWLINE token), and one END token. The token grid is the patch grid divided by
`downsample_ratio`, rounded up.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from data.document import FilePart, Picture
from data.errors import DataError

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3
GREY = (127, 127, 127)
WHITE = (255, 255, 255)  # the background of transparent images
DISPLAY_GAMMA = 1 / 2.2  # the gamma that displays assume for a file without one
# Formats whose further frames are previews and layers; viewers show only the first frame
STILL_FORMATS = ("MPO", "PSD")
MAX_PIXELS = 2**26  # 67 million, 200 MB as RGB; a small file can claim to have far more pixels


@dataclass(frozen=True)
class VisionSettings:
    """The keys of the model's `vision_config` that determine patches and image spans, with the released names and
    defaults.
    """

    patch_size: int = 14
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    @classmethod
    def from_config(cls, vision_config: Mapping[str, Any]) -> VisionSettings:
        """Read the settings from a `vision_config`, ignoring its other keys. Raises ValueError that lists every invalid
        value.
        """
        settings = cls(**{k: vision_config[k] for k in cls.__dataclass_fields__ if k in vision_config})
        rules = {
            "patch_size": settings.patch_size >= 1,
            "downsample_ratio": settings.downsample_ratio >= 1,
            "max_image_tokens": settings.max_image_tokens >= 4,  # START, one IMAGE, its NEWLINE, END
            "min_pixels": settings.min_pixels >= 0,
            "max_wh_ratio": settings.max_wh_ratio is None or settings.max_wh_ratio > 0,
        }
        bad = [f"vision_config.{k}={getattr(settings, k)!r}: out of range" for k, ok in rules.items() if not ok]
        if bad:
            raise ValueError("\n".join(bad))
        return settings


@dataclass(frozen=True)
class Grid:
    """The size of an image as (height, width) in three units: pixels after padding, patches, and IMAGE tokens."""

    pixels: tuple[int, int]
    patches: tuple[int, int]
    tokens: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the image, including the START, NEWLINE and END tokens."""
        return self.tokens[0] * (self.tokens[1] + 1) + 2

    def token_types(self) -> np.ndarray:
        """The types of the image's tokens, int8 [num_tokens]: START, then rows of IMAGE that each end in NEWLINE, then
        END.
        """
        rows, columns = self.tokens
        row = [IMAGE] * columns + [NEWLINE]
        return np.array([START, *row * rows, END], dtype=np.int8)


def plan_grid(width: int, height: int, vision: VisionSettings) -> Grid:
    """The size, after resizing and padding, of an image of `width` x `height` pixels.

    An image whose aspect ratio exceeds `max_wh_ratio` is squeezed to that ratio. An image with fewer than `min_pixels`
    pixels is enlarged. An image with more than `max_image_tokens` tokens is shrunk to the largest grid of whole tokens
    with the same aspect ratio.
    """
    patch = vision.patch_size
    if vision.max_wh_ratio is not None:
        width = min(width, height * vision.max_wh_ratio)  # type: ignore[assignment]  # a length, not pixels from here on
    if width * height < vision.min_pixels:
        ratio = (vision.min_pixels / (width * height)) ** 0.5
        width, height = int(width * ratio), int(height * ratio)
    grid = _grid(math.ceil(height / patch) * patch, math.ceil(width / patch) * patch, vision)
    if grid.num_tokens > vision.max_image_tokens:
        grid = _grid(*_shrunk(height, width, vision), vision)
    return grid


def _grid(height: int, width: int, vision: VisionSettings) -> Grid:
    patches = max(1, height // vision.patch_size), max(1, width // vision.patch_size)
    pixels = patches[0] * vision.patch_size, patches[1] * vision.patch_size
    tokens = math.ceil(patches[0] / vision.downsample_ratio), math.ceil(patches[1] / vision.downsample_ratio)
    return Grid(pixels, patches, tokens)


def _shrunk(height: float, width: float, vision: VisionSettings) -> tuple[int, int]:
    """The pixel height and width of the largest image with this aspect ratio that has at most `max_image_tokens`
    tokens.

    A grid of h rows and w columns takes h*(w+1) + 2 tokens. This equation is solved for h/w = aspect ratio and rounded
    down to whole tokens. The order of the products matters: `height * (rows * cell / height)` can round to just below a
    multiple of the patch size, and then the released image processor loses a patch. A test compares the sizes with
    those of the released image processor.
    """
    patch, cell, budget = vision.patch_size, vision.patch_size * vision.downsample_ratio, vision.max_image_tokens - 2
    aspect = height / width
    columns = math.sqrt(budget / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:  # narrower than one token
        return budget // 2 * cell, cell
    if rows < 1:  # lower than one token
        return cell, (budget - 1) * cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(height * scale / patch) * patch, math.floor(width * scale / patch) * patch


def preprocess(image: Image.Image, vision: VisionSettings) -> tuple[torch.Tensor, Grid]:
    """The patches of an image in reading order, float32 [h*w, 3, patch, patch] in [-1, 1], and its grid."""
    image = as_shown(image)
    grid = plan_grid(image.width, image.height, vision)
    height, width = grid.pixels
    if vision.max_wh_ratio is not None and image.width > image.height * vision.max_wh_ratio:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    else:
        image = ImageOps.pad(image, (width, height), method=Image.Resampling.BICUBIC, color=GREY)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5)
    (rows, columns), patch = grid.patches, vision.patch_size
    patches = pixels.view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
    return patches.reshape(rows * columns, 3, patch, patch), grid


class AmbiguousImage(ValueError):
    """The error for an image file that cannot be shown as one picture; its message gives the reason and the remedy."""


def as_shown(image: Image.Image) -> Image.Image:
    """Convert an image to RGB so that it looks as in an image viewer, which can differ from the stored pixel values.

    The camera orientation, the colour profile or gamma, and the range of 16-bit grey are applied; transparent pixels
    become white. Raises `AmbiguousImage` for a file with several frames or pages, and for pixel formats in which no
    value is defined as white.
    """
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format not in STILL_FORMATS:
        raise AmbiguousImage(f"it has {frames} frames or pages; save those to train on as separate images")
    image = ImageOps.exif_transpose(image) or image
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode == "F":
        raise AmbiguousImage(
            "its pixels are floating-point numbers, for which white is not defined; convert it to 8 bits per channel"
        )
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    alpha = None
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        image = image.convert("RGBA") if image.mode == "P" else image
    shown = _in_srgb(image)
    if alpha is not None:
        shown = Image.composite(shown, Image.new("RGB", shown.size, WHITE), alpha)
    return shown


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale an image with integer pixels to 8-bit grey, because Pillow's own conversion clips all values above 255."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise AmbiguousImage("its pixels are 32-bit numbers, for which white is not defined; convert it to 8 bits")
    grey = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):  # this grey value is transparent
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def _in_srgb(image: Image.Image) -> Image.Image:
    """Convert the colours of an image to sRGB. A colour profile that is damaged or does not fit the image is
    ignored.
    """
    profile, gamma = image.info.get("icc_profile"), image.info.get("gamma")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            mode = {"GRAY": "L", "CMYK": "CMYK"}.get(source.profile.xcolor_space.strip(), "RGB")
            if "sRGB" not in ImageCms.getProfileDescription(source) and (mode == "CMYK") == (image.mode == "CMYK"):
                target = ImageCms.createProfile("sRGB")
                return ImageCms.profileToProfile(image.convert(mode), source, target, outputMode="RGB") or image
        except (ImageCms.PyCMSError, OSError):
            pass
    elif gamma and "srgb" not in image.info and abs(gamma / DISPLAY_GAMMA - 1) > 0.05:
        exponent = DISPLAY_GAMMA / gamma
        return image.convert("RGB").point([round(255 * (v / 255) ** exponent) for v in range(256)] * 3)
    return image.convert("RGB")


def open_picture(image: Path | bytes, file: str, line: int) -> Picture:
    """Read the size of an image, given as a path or as bytes, from its header. The image is decoded when it is used.

    Raises `DataError` if the image is missing, of an unknown format or larger than MAX_PIXELS. The error gives `file`
    and `line` of the record that refers to the image.
    """
    name = _name(image)
    with _data_errors(name, file, line), _opened(image) as picture:
        width, height = picture.size
        if width * height > MAX_PIXELS:
            detail = f"{name} has {width}x{height} pixels, at most {MAX_PIXELS} are allowed"
            raise DataError(file, line, "image is too large", detail)
        if _is_turned(picture):
            width, height = height, width
    key = hashlib.blake2b(image, digest_size=16).hexdigest() if isinstance(image, bytes) else name
    return Picture(key, image, width, height, file, line)


def load_picture(picture: Picture) -> Image.Image:
    """Decode an image, as an image viewer shows it.

    Raises `DataError` if the image is missing or damaged, or if its size has changed since its document was read.
    """
    name = _name(picture.image)
    with _data_errors(name, picture.file, picture.line), _opened(picture.image) as image:
        shown = as_shown(image)
    if shown.size != (picture.width, picture.height):
        now, before = "x".join(map(str, shown.size)), f"{picture.width}x{picture.height}"
        detail = f"{name} has {now} pixels, but {before} when its document was tokenised; empty data.cache_dir"
        raise DataError(picture.file, picture.line, "image has changed", detail)
    return shown


def _name(image: Path | bytes | FilePart) -> str:
    if isinstance(image, Path):
        return str(image)
    return f"image of {len(image) if isinstance(image, bytes) else image.size} bytes"


def _opened(image: Path | bytes | FilePart) -> Image.Image:
    if isinstance(image, FilePart):
        with image.path.open("rb") as file:
            file.seek(image.start)
            image = file.read(image.size)
    return Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)


def _is_turned(image: Image.Image) -> bool:
    """Whether the camera orientation swaps width and height; for TIFF the answer is False, because Pillow itself
    applies the orientation. Only the header is read: a PNG without EXIF data in the header counts as not turned,
    because Pillow would decode the image to look for EXIF data after the pixels.
    """
    known = "exif" in image.info if image.format == "PNG" else image.format != "TIFF"
    return known and image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)


class _data_errors:
    """A context manager that turns Pillow's exceptions into a `DataError` with the name of the image and the record
    that refers to it.
    """

    def __init__(self, name: str, file: str, line: int):
        self.name, self.file, self.line = name, file, line
        self.warnings = warnings.catch_warnings()

    def __enter__(self) -> None:
        self.warnings.__enter__()
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # open_picture has its own, lower limit

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.warnings.__exit__(kind, error, trace)
        if isinstance(error, FileNotFoundError):
            raise DataError(self.file, self.line, "missing image", self.name) from None
        if isinstance(error, UnidentifiedImageError):
            raise DataError(self.file, self.line, "unknown image format", self.name) from None
        if isinstance(error, Image.DecompressionBombError):
            raise DataError(self.file, self.line, "image is too large", self.name) from None
        if isinstance(error, AmbiguousImage):
            raise DataError(self.file, self.line, "image is not one picture", f"{self.name}: {error}") from None
        if isinstance(error, Exception) and not isinstance(error, DataError):  # each format's decoder raises its own
            raise DataError(self.file, self.line, "corrupt image", f"{self.name}: {error}") from None
