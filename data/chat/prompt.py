"""Turns messages into a prompt (token ids and images), which the model continues with its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from data.chat.conversation import DEFAULT_EFFORT
from data.chat.read import read_conversation
from data.chat.render import END_THINK, THINK, render
from data.document import Control, Part, Picture
from data.errors import DataError
from data.tokenizer import ASSISTANT, special_ids
from data.tokens import control_ids

if TYPE_CHECKING:
    from torch import Tensor

    from data.images import VisionSettings


@dataclass(frozen=True)
class Prompt:
    """A prompt whose images have not been decoded yet.

    ids: token ids. types: for each token its image token type, or -1 for text (see `Grid.token_types`). pictures: the
    images in reading order; vision: the settings that determine how images become patches.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()
    vision: VisionSettings | None = None

    def images(self) -> dict[str, Tensor] | None:
        """Decode the images and return `pixel_values` (fp32 [patches, 3, p, p], in [-1, 1]), `image_grid_hws` (int64
        [images, 2], in patches) and `vision_token_types` (int64 [len(ids)]). Returns None if the prompt has no images.
        Raises `DataError` for a damaged image.
        """
        if not self.pictures:
            return None
        import torch

        from data.images import load_picture, preprocess

        assert self.vision is not None, "a prompt with images must have vision settings"
        found = [preprocess(load_picture(picture), self.vision) for picture in self.pictures]
        return {
            "pixel_values": torch.cat([patches for patches, _ in found]),
            "image_grid_hws": torch.tensor([grid.patches for _, grid in found]),
            "vision_token_types": torch.tensor(self.types),
        }


def prompt_ids(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    thinking: bool = False,
    effort: str | int = DEFAULT_EFFORT,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a conversation without images, up to and including the header of the answer to be generated.

    thinking, effort, tools: have the same meaning as in a record (see the docstring of data/chat/__init__.py). Raises
    `DataError` for malformed messages.
    """
    record = {"messages": messages, "thinking": thinking, "effort": effort, "tools": tools}
    ids: list[int] = []
    for part in _parts(tokenizer, record, "messages", 0):
        if isinstance(part, Picture):
            raise DataError("messages", 0, "image in a text prompt", part.key)
        ids += part
    return ids


def read_prompt(
    tokenizer: Tokenizer, record: dict[str, Any], vision: VisionSettings | None, file: str = "messages", line: int = 0
) -> Prompt:
    """The prompt of a record with its images, up to and including the header of the answer to be generated.

    record: `messages` and the other keys that a record may have (see data/chat/__init__.py). vision: the image settings
    of the model, or None if the model reads no images. Image paths are relative to the folder of `file`. Raises
    `DataError`, naming `file` and `line`, for a malformed record, an image that cannot be read, and an image for a
    model or tokenizer without images.
    """
    ids: list[int] = []
    types: list[int] = []
    pictures: list[Picture] = []
    image = special_ids(tokenizer).image
    for part in _parts(tokenizer, record, file, line):
        if not isinstance(part, Picture):
            ids += part
            types += [-1] * len(part)
            continue
        from data.images import plan_grid

        if vision is None or image is None:
            detail = "the model has no vision_config, or the tokenizer has no image token"
            raise DataError(file, line, "image for a model without vision", detail)
        span = plan_grid(part.width, part.height, vision).token_types().tolist()
        ids += [image] * len(span)
        types += span
        pictures.append(part)
    return Prompt(tuple(ids), tuple(types), tuple(pictures), vision)


def _parts(tokenizer: Tokenizer, record: dict[str, Any], file: str, line: int) -> Iterator[list[int] | Picture]:
    """Yield the token ids and images of a record's conversation, followed by the header of the answer to be
    generated.
    """
    rendered = render(read_conversation(record, file, line, for_training=False), set())
    if (bos := special_ids(tokenizer).bos) is not None:
        yield [bos]
    last: tuple[Part, ...] = (Control(ASSISTANT), THINK if record.get("thinking") else END_THINK)
    for part in (*rendered.parts, *last):
        if isinstance(part, Control):
            yield control_ids(tokenizer, part)
        elif isinstance(part, str):
            yield tokenizer.encode(part, add_special_tokens=False).ids
        else:
            assert isinstance(part, Picture), "a conversation holds no token ids"
            yield part
