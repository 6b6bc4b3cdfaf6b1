"""Turns packed rows of token ids into the tensors of a batch."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from data.document import Picture
from data.errors import BadRecordPolicy, DataError
from data.images import GREY, TEXT, VisionSettings, load_picture, preprocess
from data.tokenizer import SpecialIds
from data.windows import PackingWindow

Batch = dict[str, torch.Tensor]
IGNORE_INDEX = -100  # the label of a token that is not a target of the loss


class Collator:
    """Makes batches of packed rows.

    A batch is a dictionary of CPU tensors:
        input_ids: int64 [B, S], the token ids.
        labels: int64 [B, S], the target labels, not shifted. A label is IGNORE_INDEX at padding, at image tokens, at
            the first token of every piece of a document, and where the loss mask is False.
        seq_lens: int64 [B, pieces], the lengths of the pieces of documents in each row, padded with zeros. With
            `pairs`, every document is treated as two pieces: the conversation with the preferred answer, and the
            conversation with the rejected answer.
    on_error: what happens if an image cannot be loaded, `stop` or `skip` (see `data.on_error`).

    A batch from a source with images also has:
        pixel_values: float32 [patches, 3, p, p], the patches of all images.
        image_grid_hws: int64 [images, 2], height and width of each image in patches.
        vision_token_types: int64 [B, S], the types of image tokens (see `Grid.token_types`), -1 for text.
    """

    def __init__(
        self,
        seq_len: int,
        special: SpecialIds,
        vision: VisionSettings | None,
        pairs: bool = False,
        on_error: str = "stop",
    ):
        self.seq_len, self.special, self.vision, self.pairs = seq_len, special, vision, pairs
        self.policy = BadRecordPolicy(on_error)

    def collate(self, chosen: list[tuple[PackingWindow, int]]) -> Batch:
        """Make a batch of the chosen rows, each given as (packing window, index of the row in it). The row index -1
        stands for a row of padding.
        """
        shape = len(chosen), self.seq_len
        ids = np.full(shape, self.special.pad, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        pictures: list[tuple[int, slice, Picture]] = []  # row, place of the document in the row, picture
        lengths: list[list[int]] = []
        for i, (window, row) in enumerate(chosen):
            store, rows, at = window.store, window.rows, 0
            pieces = range(rows.offsets[row], rows.offsets[row + 1]) if row >= 0 else ()
            lengths.append([])
            for piece in pieces:
                document, length = int(rows.document[piece]), int(rows.length[piece])
                first = int(store.offsets[document] + rows.start[piece])
                ids[i, at : at + length] = store.tokens[first : first + length]
                lengths[-1] += self._halves(ids[i, at : at + length]) if self.pairs else [length]
                # No label at a piece's first token: nothing before it predicts it
                targets = ids[i, at + 1 : at + length]
                if store.loss_mask is not None:
                    targets = np.where(store.loss_mask[first + 1 : first + length], targets, IGNORE_INDEX)
                labels[i, at + 1 : at + length] = targets
                pictures += [(i, slice(at, at + length), picture) for picture in store.pictures.get(document, ())]
                at += length
        width = max(1, *map(len, lengths)) if lengths else 1
        seq_lens = np.array([row + [0] * (width - len(row)) for row in lengths], np.int64)
        batch = {"input_ids": ids, "labels": labels, "seq_lens": seq_lens}
        if self.vision is not None:
            batch |= self._images(ids, labels, pictures)
            labels[batch["vision_token_types"] != TEXT] = IGNORE_INDEX
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _halves(self, ids: np.ndarray) -> list[int]:
        """The lengths of the two conversations of a preference pair. The second conversation begins at the only BOS
        after the first token, because no text contains BOS.
        """
        first = int((ids[1:] == self.special.bos).argmax()) + 1
        return [first, len(ids) - first]

    def _images(
        self, ids: np.ndarray, labels: np.ndarray, pictures: list[tuple[int, slice, Picture]]
    ) -> dict[str, np.ndarray]:
        """The tensors of the images; each image belongs to the first image span in its document that has no image yet.
        An image that cannot be loaded is reported to the policy; if the policy does not stop the run, the image becomes
        grey and no token of its document is a target.
        """
        vision = self.vision
        assert vision is not None
        size = vision.patch_size
        types = np.full(ids.shape, TEXT, np.int64)
        patches, grids = [np.zeros((0, 3, size, size), np.float32)], []
        for row, place, picture in pictures:
            try:
                image = load_picture(picture)
            except DataError as error:
                self.policy.report(error)
                image = Image.new("RGB", (picture.width, picture.height), GREY)
                labels[row, place] = IGNORE_INDEX
            pixels, grid = preprocess(image, vision)
            free = (ids[row, place] == self.special.image) & (types[row, place] == TEXT)
            begin = place.start + int(free.argmax())
            types[row, begin : begin + grid.num_tokens] = grid.token_types()
            patches.append(pixels.numpy())
            grids.append(grid.patches)
        return {
            "vision_token_types": types,
            "image_grid_hws": np.array(grids, np.int64).reshape(-1, 2),
            "pixel_values": np.concatenate(patches),
        }
