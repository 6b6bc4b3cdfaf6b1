"""Checkpoints that are written while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from train.checkpoint.storage import ShardedTensor


class Background:
    """Writes checkpoints in a thread while training continues, at most one at a time.

    The class is a context manager; on exit it waits until the last checkpoint is written. Each checkpoint is first
    copied into a buffer in host memory (pinned memory if there is a GPU). The next checkpoint uses the same buffer.
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
            if kind is None:  # otherwise the run itself has failed, and its error matters more
                raise

    def check(self) -> None:
        """Raise the error of the previous checkpoint if writing it has failed by now. Called in every training step."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete. If writing it failed, raise the error."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def start(self, tensors: dict[str, ShardedTensor], write: Callable[[dict[str, ShardedTensor]], None]) -> None:
        """Copy the tensors, then call ``write`` with the copies in a thread. Call `wait` before calling this."""
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
