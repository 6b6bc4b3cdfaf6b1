"""Compiles every kernel at the sizes of the released model, also without a GPU, and prints the resources that each
kernel needs.

`python -m model.kernels.table [--arch 90] [--tokens 65536] [--json] [kernel ...]` prints registers per thread, shared
memory and register spills, which are read from the compiled code. Arithmetic intensity and the time on an H200 are
estimates, which assume that matrix products run at the peak rate and that every tensor is moved once (see `Launch`).
TRITON_INTERPRET must not be set.
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
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.config import TextConfig
from model.kernels import engram, hyper, indexer, moe, norm, rope, sparse
from model.kernels.launch import Launch, recording

# The peak rates of an H200 according to its data sheet: dense bf16 FLOP/s and memory bandwidth.
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
    """A kernel compiled for the GPU architecture sm_<arch>, and the resources that it needs.

    warps: number of warps of a program. registers: registers per thread. shared: bytes of shared memory.
    local: bytes of local memory (register spills) per thread. fused: number of fused multiply-adds in the PTX.
    intensity: estimated FLOPs per byte of memory traffic. microseconds: estimated time on an H200.
    ttir: the kernel in Triton IR (text).
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
    """Returns the launches of every kernel for one row of `tokens` tokens at the sizes of the released model, with bf16
    activations.
    """
    c = TextConfig()
    with recording() as found:
        _hyper_connections(c, tokens)
        _rotations(c, tokens)
        _attention(c, tokens)
        _indexer(c, tokens)
        _elementwise(c, tokens)
    return _different(found)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _fp32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _hyper_connections(c: TextConfig, tokens: int) -> None:
    n, d = c.hc_mult, c.hidden_size
    streams, y = _meta(tokens, n, d), _meta(tokens, d)
    parameters = _fp32((2 + n) * n, n * d), _fp32((2 + n) * n), _fp32(3)
    found = hyper._coefficients(streams, *parameters, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
    pre, post, comb = found[:3]
    hyper._coefficients_backward(pre, post, comb, streams, *parameters, *found[2:])
    hyper.collapse(streams, pre)
    hyper._collapse_backward(y, streams, pre)
    hyper.expand(streams, y, post, comb)
    hyper._expand_backward(streams, streams, y, post, comb)


def _rotations(c: TextConfig, tokens: int) -> None:
    turns = _fp32(tokens, c.qk_rope_head_dim // 2, 2)
    rope._rotate(_meta(tokens, c.num_attention_heads, c.head_dim), turns, False, "none")
    rope._rotate(_meta(tokens, c.head_dim), turns, False, "fp8")
    rope._rotate(_meta(tokens, c.head_dim), turns, False, "fp4")
    rope._rotate(_meta(tokens, c.index_n_heads, c.index_head_dim), turns, False, "mxfp4")


def _attention(c: TextConfig, tokens: int) -> None:
    q, keys = _meta(tokens, c.num_attention_heads, c.head_dim), _meta(tokens, c.head_dim)
    window_start, chosen = _meta(tokens, dtype=torch.int64), _meta(tokens, c.index_topk, dtype=torch.int32)
    given = q, keys, window_start, keys, chosen, _fp32(c.num_attention_heads)
    scale, window = c.head_dim**-0.5, c.sliding_window
    out, _, lse = sparse._attention(*given, scale, window)
    for deterministic in (False, True):
        sparse._attention_backward(out, *given, out, lse, scale, window, deterministic)


def _indexer(c: TextConfig, tokens: int) -> None:
    def asked(queries: int) -> tuple[Tensor, Tensor, Tensor]:
        q, weights = _meta(queries, c.index_n_heads, c.index_head_dim), _fp32(queries, c.index_n_heads)
        return q, weights, _meta(tokens, c.index_head_dim)

    block, part = c.candidate_block_size, max(1, tokens // 8)
    visible = _meta(tokens, dtype=torch.int64)
    indexer.block_peaks(*asked(tokens), visible, visible, 0, tokens // block, block, False, 0.0)
    candidates = _meta(part, c.candidate_topk_blocks, dtype=torch.int32)
    indexer.candidate_scores(*asked(part), candidates, visible, visible, block, 0.0)
    chosen, mass = _meta(tokens, c.index_topk, dtype=torch.int32), _fp32(tokens, c.index_topk)
    for deterministic in (False, True):
        indexer._loss(*asked(tokens), chosen, mass, _meta(tokens, dtype=torch.bool), True, deterministic)


def _elementwise(c: TextConfig, tokens: int) -> None:
    n, d = c.hc_mult, c.hidden_size
    streams, memory = _meta(tokens, n, d), _meta(tokens, n + 1, d)
    gated = streams, memory, _fp32(n, d), _meta(tokens, dtype=torch.bool), c.rms_norm_eps
    engram._add_gated(*gated)
    engram._add_gated_backward(streams, *gated)
    for width in (d, c.q_lora_rank, c.head_dim, c.index_head_dim):
        x, weight = _meta(tokens, width), _meta(width)
        _, scale = norm._norm(x, weight, c.rms_norm_eps)
        norm._norm_backward(x, x, weight, scale)
    routed = c.num_experts_per_tok * tokens
    gate, weights = _meta(routed, c.moe_intermediate_size), _fp32(routed)
    moe._swiglu(gate, gate, weights, c.swiglu_limit)
    moe._swiglu_backward(gate, gate, gate, weights, c.swiglu_limit)


def _different(launches: list[Launch]) -> list[Launch]:
    """Returns the launches without repetitions. If several launches have the same kernel, argument types and constants
    (for example in a loop over chunks), only the first is returned.
    """

    def key(launch: Launch) -> str:
        tensors = {k: v.dtype if isinstance(v, Tensor) else v for k, v in launch.arguments.items()}
        constants = {p.name: tensors[p.name] for p in launch.kernel.params if p.is_constexpr}
        kinds = [v for v in tensors.values() if isinstance(v, torch.dtype)]
        return f"{launch.kernel.__name__} {constants} {kinds}"

    return list({key(launch): launch for launch in reversed(launches)}.values())[::-1]


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile a launch for sm_<arch> without a GPU. Integer arguments are specialised as in a real launch: 1 becomes a
    constant, and multiples of 16 are marked as such.
    """
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        signature[name] = kind = _kind(value, launch.kernel.params[place].is_constexpr)
        if kind == "constexpr":
            constants[name] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    registers, local = _resources(compiled.asm["cubin"])
    return Compiled(
        name=f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__.strip('_').removesuffix('_kernel')}",
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
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if value < 2**31 else "i64"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers and the bytes of local memory per thread, as reported by NVIDIA's disassembler, which
    Triton includes.
    """
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
