"""Writes the metrics of a run as TensorBoard events. Only this file imports tensorboard, which torch's event writer
needs.
"""

from __future__ import annotations

from pathlib import Path


class TensorBoard:
    """Writes numbers as TensorBoard events into ``folder``.

    first_step: the first step that will be written. TensorBoard then hides the events that an earlier process wrote for
    this step and later steps.
    """

    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, values: dict[str, float], step: int) -> None:
        """Write the numbers of a step by name."""
        for name, value in values.items():
            if name != "step":
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, exit_code: int) -> None:
        """Close the event file. The exit code is ignored, because TensorBoard cannot store it."""
        self.writer.close()
