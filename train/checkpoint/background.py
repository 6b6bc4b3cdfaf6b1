"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from train.checkpoint.storage import ShardedTensor


class Background:
    """Writes checkpoints while training goes on, at most one at a time. A context manager: its end waits.

    A checkpoint is copied into host memory (pinned, for a GPU), which is kept for the next one.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[str, dict[int, Tensor]] = {}

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except BaseException:
            if kind is None:  # else the run has failed by itself, and says why
                raise

    def check(self) -> None:
        """Raise what went wrong in the checkpoint before, as soon as that is known. For every step."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def start(self, tensors: dict[str, ShardedTensor], write: Callable[[dict[str, ShardedTensor]], None]) -> None:
        """Copy the tensors, then ``write`` the copies in a thread. `wait` first."""
        copies = {name: spread.copied(self._buffers.setdefault(name, {})) for name, spread in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()

        def work() -> None:
            try:
                write(copies)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()
