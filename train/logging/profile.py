"""Records a trace of some training steps with torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepTrace:
    """Records the operations of some training steps and their times as a trace file, one for each rank.

    The file is ``profile/rank-<rank>-steps-<first>-<last>.json`` in the run directory; Chrome (chrome://tracing) and
    Perfetto can show it. The class is a context manager: if the run ends between the first and the last traced step,
    the trace is still written.

    Args:
        steps: first and last step to trace, counted from 1; None traces no step.
        folder: folder for the trace files.
        rank: rank of this process.
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
        """Context for the training step with this number. The context starts the trace at the first traced step, and
        ends the trace after the last traced step.
        """
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
