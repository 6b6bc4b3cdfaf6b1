"""One thread a process: the tests' tensors are too small for more, and many tests start processes of their own."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)
