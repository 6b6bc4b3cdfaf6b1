"""A source of image-text documents made of scikit-learn's handwritten digits, which need no download."""

from __future__ import annotations

import hashlib
import io
from functools import partial
from typing import Any

from PIL import Image

from data.document import Document, Picture, Position, Reading, hash_share
from data.errors import BadRecordPolicy, DataError

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FILE = "scikit-learn digits"  # the file name that these documents give in errors
LARGEST = 16  # pixel values run from 0 to 16


class DigitSource:
    """A source of 1,797 images of 8 x 8 pixels, each followed by the name of its digit. A hash of the pixels decides
    which images are held out.
    """

    def __init__(self, split: str, validation_share: float):
        self.split, self.share = split, validation_share

    def identity(self, content: bool = True) -> str:
        return f"digits {self.split} {self.share}"

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        digits = _load()
        for index in range(position or 0, len(digits.images)):
            pixels = (digits.images[index] * (255 / LARGEST)).astype("uint8")
            key = hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest()
            if (hash_share(key.encode()) < self.share) != (self.split == "validation"):
                continue
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG", compress_level=1)
            picture = Picture(key, file.getvalue(), pixels.shape[1], pixels.shape[0], FILE, index + 1)
            parts = (picture, NAMES[digits.target[index]])
            yield Document(parts, FILE, index + 1), partial(int, index + 1)


def _load() -> Any:
    try:
        from sklearn.datasets import load_digits  # slow to import, and only this source needs it
    except ModuleNotFoundError:
        remedy = "install scikit-learn, or this project with its extra `digits`"
        raise DataError(FILE, 0, "scikit-learn is not installed", remedy) from None
    return load_digits()
