"""Every kernel compiles at the released sizes for sm_90 and sm_100, without a GPU: it fits into shared memory, does not
spill, and counts rows in int64.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed: pip install 'narrows[kernels]'")

ROOT = Path(__file__).resolve().parents[3]
SHARED_LIMIT = 227 * 1024
# Bytes of local memory a thread that are allowed. On sm_90 the fp32 result of 64 x 512 takes 128 of 255 registers in
# these. What does not fit are addresses and descriptors, as the disassembly shows: stored before a loop, read in it.
ALLOWED_SPILLS = {
    "sparse.forward": 272,
    "sparse.query_backward": 592,
    "sparse.window_backward": 832,
    "sparse.entry_backward": 448,
}


def table(*arguments: str) -> list[dict]:
    """In a process of its own, since here kernels may be interpreted ones."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    }
    command = [sys.executable, "-m", "model.kernels.table", "--json", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return table("--arch", "90", "100")


@pytest.mark.slow
def test_one_token() -> None:
    """An argument that is 1 becomes a constant of the kernel, without the methods of a number that varies."""
    assert table("--tokens", "1")


@pytest.mark.slow
def test_every_kernel_fits(compiled: list[dict]) -> None:
    assert {one["arch"] for one in compiled} == {90, 100}
    for one in compiled:
        name = f"{one['name']} on sm_{one['arch']}"
        assert one["shared"] <= SHARED_LIMIT, f"{name}: {one['shared']} bytes of shared memory"
        assert one["local"] <= ALLOWED_SPILLS.get(one["name"], 0), f"{name}: spills {one['local']} bytes a thread"
        assert one["registers"] <= 255


@pytest.mark.slow
def test_every_kernel_is_compiled(compiled: list[dict]) -> None:
    """The table misses none that the sources define."""
    defined = set()
    for path in (ROOT / "model/kernels").glob("*.py"):
        names = re.findall(r"^def _(\w+)_kernel\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        defined |= {f"{path.stem}.{name}" for name in names}
    assert {one["name"] for one in compiled} == defined


@pytest.mark.slow
def test_rows_are_counted_in_int64(compiled: list[dict]) -> None:
    """65,536 tokens x 64 heads x 512 is 2^31: the program's number is widened before anything is done with it."""
    for one in compiled:
        text = one["ttir"]
        for number in re.findall(r"(%\S+) = tt\.get_program_id x", text):
            uses = re.findall(rf"= (\S+) [^=\n]*{re.escape(number)}(?![\w]).*", text)
            assert set(uses) == {"arith.extsi"}, f"{one['name']}: its row is used in int32 by {set(uses)}"


@pytest.mark.slow
def test_exact_rounding_has_no_fused_products(compiled: list[dict]) -> None:
    """A fused multiply-add rounds once where the plain code rounds twice; the interpreter does not show it."""
    exact = [one for one in compiled if one["name"] == "rope.rotate"]
    assert exact and not any(one["fused"] for one in exact)
