"""A trace of some steps, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepTrace:
    """Records operations and their times from one step to another, as ``profile/rank-<rank>-steps-<first>-<last>.json``
    in the run directory. Chrome (chrome://tracing) and Perfetto show the file. Every rank writes its own.

    Args:
        steps: first and last step, counted from 1; None: nothing is recorded.
        folder: where the traces are written.
        rank: of this process.

    Used as a context: a run that ends between the two steps writes what it has recorded.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int):
        self.steps, self.folder, self.rank = steps, folder, rank
        self.profiler: profile | None = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._write()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround a step, whose number is given."""
        if self.steps is not None and self.profiler is None and self.steps[0] <= number <= self.steps[1]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.start()
        with record_function(f"step {number}"):  # names the step in the trace
            yield
        if self.steps is not None and number >= self.steps[1]:
            self._write()

    def _write(self) -> None:
        if self.profiler is None or self.steps is None:
            return
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        first, last = self.steps
        profiler.export_chrome_trace(str(self.folder / f"rank-{self.rank:05d}-steps-{first}-{last}.json"))
