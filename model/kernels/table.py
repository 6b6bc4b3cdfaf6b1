"""Compiles every kernel at the released sizes for a GPU that need not be there, and prints what it needs.

`python -m model.kernels.table [--arch 90] [--tokens 65536] [--json] [kernel ...]`: registers a thread, shared memory
and spills as the compiled code says; arithmetic intensity and the time that an H200 would take at its peak rates are
estimates (`Launch`: matrix products, and every tensor moved once). TRITON_INTERPRET must not be set.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.config import TextConfig
from model.kernels import hyper, indexer, rope, sparse
from model.kernels.launch import Launch, recording

# H200, dense bf16 and memory, as the data sheet says.
PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12
SHARED_LIMIT = 227 * 1024
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for sm_<arch>: bytes of shared memory, registers and bytes of local memory (spills) a thread,
    fused multiply-adds in its PTX, and the estimates.
    """

    name: str
    arch: int
    warps: int
    registers: int
    shared: int
    local: int
    fused: int
    intensity: float
    microseconds: float
    ttir: str


def released_launches(tokens: int = 65536) -> list[Launch]:
    """The launches of every kernel for one row of `tokens` at the released sizes, with bf16 activations."""
    c = TextConfig()

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fp32(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.float32)

    n, d = c.hc_mult, c.hidden_size
    rows = (2 + n) * n
    with recording() as found:
        streams, y = meta(tokens, n, d), meta(tokens, d)
        parameters = fp32(rows, n * d), fp32(rows), fp32(3)
        pre, post, comb, mixes, norm, steps = hyper._coefficients(
            streams, *parameters, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
        )
        hyper._coefficients_backward(pre, post, comb, streams, *parameters, comb, mixes, norm, steps)
        hyper.collapse(streams, pre)
        hyper._collapse_backward(y, streams, pre)
        hyper.expand(streams, y, post, comb)
        hyper._expand_backward(streams, streams, y, post, comb)
        q, turns = meta(tokens, c.num_attention_heads, c.head_dim), fp32(tokens, c.qk_rope_head_dim // 2, 2)
        rope._rotate(q, turns, False, "none")
        rope._rotate(meta(tokens, c.head_dim), turns, False, "fp8")
        rope._rotate(meta(tokens, c.head_dim), turns, False, "fp4")
        rope._rotate(meta(tokens, c.index_n_heads, c.index_head_dim), turns, False, "mxfp4")
        window_kv, entries = meta(tokens, c.head_dim), meta(tokens, c.head_dim)
        window_start, sink = meta(tokens, dtype=torch.int64), fp32(c.num_attention_heads)
        topk_indices = meta(tokens, c.index_topk, dtype=torch.int32)
        attended = (q, window_kv, window_start, entries, topk_indices, sink)
        out, mass, lse = sparse._attention(*attended, c.head_dim**-0.5, c.sliding_window)
        for deterministic in (False, True):
            sparse._attention_backward(out, *attended, out, lse, c.head_dim**-0.5, c.sliding_window, deterministic)
        asked = meta(tokens, c.index_n_heads, c.index_head_dim), fp32(tokens, c.index_n_heads)
        keys, visible = meta(tokens, c.index_head_dim), window_start
        block = c.candidate_block_size
        indexer.block_peaks(*asked, keys, visible, visible, 0, tokens // block, block, False, 0.0)
        candidates = meta(tokens // 8, c.candidate_topk_blocks, dtype=torch.int32)
        indexer.candidate_scores(*(x[: tokens // 8] for x in asked), keys, candidates, visible, block, 0.0)
        supervised = meta(tokens, dtype=torch.bool)
        for deterministic in (False, True):
            indexer._loss(*asked, keys, topk_indices, mass, supervised, True, deterministic)
    return _different(found)


def _different(launches: list[Launch]) -> list[Launch]:
    """Without those that repeat a kernel with the same types and constants (a loop over chunks)."""

    def key(launch: Launch) -> str:
        tensors = {k: v.dtype if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
        constants = {p.name: tensors[p.name] for p in launch.kernel.params if p.is_constexpr}
        kinds = [v for v in tensors.values() if isinstance(v, torch.dtype)]
        return f"{launch.kernel.__name__} {constants} {kinds}"

    return list({key(launch): launch for launch in reversed(launches)}.values())[::-1]


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile without a GPU. Integers are specialised as at a launch: 1 is a constant, multiples of 16 are known."""
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        signature[name] = kind = _kind(value, launch.kernel.params[place].is_constexpr)
        if kind == "constexpr":
            constants[name] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    registers, local = _resources(compiled.asm["cubin"])
    return Compiled(
        name=launch.kernel.__name__.strip("_").removesuffix("_kernel"),
        arch=arch,
        warps=compiled.metadata.num_warps,
        registers=registers,
        shared=compiled.metadata.shared,
        local=local,
        fused=compiled.asm["ptx"].count("fma."),
        intensity=launch.flops / launch.bytes,
        microseconds=1e6 * max(launch.flops / PEAK_FLOPS, launch.bytes / PEAK_BYTES),
        ttir=compiled.asm["ttir"],
    )


def _kind(value: Any, is_constexpr: bool) -> str:
    if is_constexpr or value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if value < 2**31 else "i64"


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread, as NVIDIA's disassembler reports them; Triton brings it along."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    use = [
        {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}
        for line in report.splitlines()
        if "REG:" in line
    ]
    return max(u["REG"] for u in use), max(u["STACK"] + u["LOCAL"] for u in use)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="only kernels whose names contain one of these")
    parser.add_argument("--arch", type=int, nargs="*", default=[90], help="compute capabilities, such as 90 100")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--json", action="store_true", help="one JSON list, with each kernel's TTIR")
    chosen = parser.parse_args(arguments)
    launches = [
        launch
        for launch in released_launches(chosen.tokens)
        if not chosen.kernels or any(part in launch.kernel.__name__ for part in chosen.kernels)
    ]
    found = (compile_launch(launch, arch) for arch in chosen.arch for launch in launches)
    if chosen.json:
        json.dump([asdict(one) for one in found], sys.stdout)
        return
    print(f"one row of {chosen.tokens} tokens at the released sizes, bf16; the last two columns: estimates for an H200")
    print(f"{'kernel':<32} sm  warps  regs  shared KiB  spill B  flop/byte  roofline us")
    for k in found:
        print(
            f"{k.name:<32} {k.arch:<4}{k.warps:>4}  {k.registers:>4}  {k.shared / 1024:>10.1f}  {k.local:>7}"
            f"  {k.intensity:>9.1f}  {k.microseconds:>11.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
