"""How many threads a run takes: one on few cores, what the user says in any case; set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from train.__main__ import choose_threads


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [
        ({}, 2, {"OMP_NUM_THREADS": "1"}),
        ({}, 16, {}),
        ({"OMP_NUM_THREADS": "2"}, 2, {"OMP_NUM_THREADS": "2"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_one_thread_on_few_cores_unless_the_user_says(given: dict[str, str], cores: int, expected: dict) -> None:
    environment = dict(given)
    choose_threads(environment, cores)
    assert environment == expected


def test_torch_is_imported_after_the_choice() -> None:
    code = "import os, sys; os.sched_getaffinity = lambda _: {0, 1}; import train.__main__\n"
    code += "assert 'torch' not in sys.modules; import torch; print(torch.get_num_threads())"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "MKL_"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
