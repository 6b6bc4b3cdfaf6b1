"""A source of folders with images and captions, such as scanned pages: `page.png`, and its text in `page.txt`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from data.document import Document, Position, Reading
from data.errors import BadRecordPolicy, DataError
from data.files import File, decode
from data.sources import FileSource

CAPTION = ".txt"


class ImageFiles(FileSource):
    """A source that makes one document of each image: the image, then its caption. The caption is the text of the file
    beside the image that has the same name with the suffix .txt. A position is the number of the file after the last
    one that has been read.
    """

    divisible = False

    def identity(self, content: bool = True) -> str:
        captions = [File(caption_of(file.path), file.name) for file in self.files]
        return f"{super().identity(content)} {FileSource(captions).identity(content)}"

    def read(self, policy: BadRecordPolicy, position: Position = None) -> Reading:
        from data.images import open_picture  # needs Pillow and torch

        for index in (index for index in self._dealt() if index >= (position or 0)):
            path = self.files[index].path
            try:
                parts = (open_picture(path, str(path), 0), _caption(path, policy))
            except DataError as error:
                policy.report(error)
            else:
                yield Document(parts, str(path), 0), partial(int, index + 1)


def caption_of(image: Path) -> Path:
    """The file with the caption of an image."""
    return image.with_suffix(CAPTION)


def _caption(image: Path, policy: BadRecordPolicy) -> str:
    path = caption_of(image)
    try:
        text = decode(path.read_bytes(), str(path), policy)
    except OSError as error:
        detail = f"{path}: {error.strerror}; every image needs a text file of its name beside it"
        raise DataError(str(image), 0, "image without a caption", detail) from None
    if not text.strip():
        raise DataError(str(path), 0, "empty file", "the caption of an image needs text")
    return text
