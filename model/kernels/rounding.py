"""Functions that round to FP8 and FP4 inside Triton kernels. The rounded values equal those of model/quantize.py bit
for bit.

All rounding works on the bits of fp32 numbers, because not every GPU has casts to 8 bits, and because the casts of
Triton's interpreter round ties and subnormal bf16 values wrongly. Kernels that call these functions are compiled with
`enable_fp_fusion=False`.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
E4M3_SMALLEST = tl.constexpr(2.0**-9)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SIGN = tl.constexpr(-(2**31))


@triton.jit
def with_sign(magnitude, x):
    """Returns the fp32 number `magnitude`, which must be >= 0, with the sign bit of x."""
    return (magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def round_bits(x, DROPPED: tl.constexpr):
    """Round the fp32 numbers x to a mantissa that is DROPPED bits shorter; ties are rounded to even. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) & (-(1 << DROPPED))
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def widen(x):
    """Returns x converted to fp32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """Convert fp32 x to TYPE, rounding to nearest and ties to even."""
    if TYPE == tl.bfloat16:
        return (round_bits(x, 16).to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def round_e4m3(x):
    """Round to the nearest E4M3 value, ties to even, clipped at 448."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > E4M3_MAX, E4M3_MAX, magnitude)
    # below 2^-6, E4M3 values are 2^-9 apart, as fp32 values just above 2^14 are
    rounded = tl.where(magnitude < 0.015625, (magnitude + 16384.0) - 16384.0, round_bits(magnitude, 20))
    return with_sign(rounded, x)


@triton.jit
def round_e2m1(x):
    """Round to the nearest E2M1 value, ties to the even mantissa, clipped at 6."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > E2M1_MAX, E2M1_MAX, magnitude)
    step = tl.where(magnitude >= 4.0, 2.0, tl.where(magnitude >= 2.0, 1.0, 0.5))
    whole = (tl.div_rn(magnitude, step) + 8388608.0) - 8388608.0  # adding 2^23 rounds to an integer
    return with_sign(whole * step, x)


@triton.jit
def power_of_two_above(x):
    """Returns the smallest power of two >= x, for positive normal x."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def fake_round(x, FORMAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Apply the fake quantiser FORMAT (fp8, mxfp4 or fp4) to x fp32 [ROWS, WIDTH], which must be zero at padding."""
    SIZE: tl.constexpr = 16 if FORMAT == "fp4" else 32
    groups = tl.reshape(x, [ROWS, WIDTH // SIZE, SIZE])
    peak = tl.max(tl.abs(groups), 2)
    if FORMAT == "fp8":
        scale = power_of_two_above(tl.div_rn(tl.maximum(peak, 1e-4), E4M3_MAX))[:, :, None]
        rounded = round_e4m3(tl.div_rn(groups, tl.broadcast_to(scale, groups.shape)))
    elif FORMAT == "mxfp4":
        scale = power_of_two_above(tl.div_rn(tl.maximum(peak, E2M1_MAX * SMALLEST_NORMAL), E2M1_MAX))[:, :, None]
        rounded = round_e2m1(tl.div_rn(groups, tl.broadcast_to(scale, groups.shape)))
    else:
        peak = tl.div_rn(tl.maximum(peak, E2M1_MAX * E4M3_SMALLEST), E2M1_MAX)
        scale = round_e4m3(peak)[:, :, None]
        rounded = round_e2m1(tl.div_rn(groups, tl.broadcast_to(scale, groups.shape)))
    return tl.reshape(rounded * scale, [ROWS, WIDTH])
