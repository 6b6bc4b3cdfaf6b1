"""A loaded machine costs its share: threads of a step sleep while they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_the_policy_is_set_before_torch_reads_it_and_a_users_own_stands(given: str | None, expected: str) -> None:
    code = "import os, sys, train.__main__; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
