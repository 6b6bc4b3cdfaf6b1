"""One thread a process: the tests' tensors are too small for more, and many tests start processes of their own.

Without a GPU Triton's kernels run in its interpreter. Triton asks for that when it is imported, and libraries import
it, so it is said here.
"""

import os

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: a worker for each core that this process may use, at most eight."""
    return min(len(os.sched_getaffinity(0)), 8) if hasattr(os, "sched_getaffinity") else min(os.cpu_count() or 1, 8)
