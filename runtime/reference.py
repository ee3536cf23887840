# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The float64 reference: formats, quantisers and the block-scaled matmul, by definition.

Everything that a kernel computes is checked against this file, so it shares no code with any
kernel and takes no value from another implementation: the tables of the 8-bit and 4-bit floats
are built bit by bit from the definitions in the OCP documents "8-bit Floating Point
Specification (OFP8)" 1.0 and "Microscaling Formats (MX) Specification" 1.0, and every step is
exact in float64 up to the sum over K.

Codes and scales go in and out as raw uint8. Arrays of int8 or of the ml_dtypes types are taken
by their bytes; no scale is ever cast as a number.

The shapes, with ``ceil`` for every division:

    x [M, K]     x_scale [M, K/32]
    w [N, K]     w_scale [N/rows, K/columns]   for a weight block of rows x columns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Element = Literal["e4m3", "e5m2", "e2m1"]
Rule = Literal["rceil", "floor", "ceil", "even"]
Kind = Literal["bf16", "f16", "f32"]
Bytes = npt.NDArray[np.uint8]
Reals = npt.NDArray[np.float64]
AnyArray = npt.NDArray[Any]

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 255
SCALE_MAX = 254


@dataclass(frozen=True)
class Format:
    """A small float: a sign, ``exponent_bits``, ``mantissa_bits``, and what its last codes mean.

    ``max_code`` is the largest finite code; ``nan_code`` is the code that a NaN encodes to, if any.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None
    infinity_code: int | None = None

    @property
    def sign_bit(self) -> int:
        """The code with only the sign set, which is also the number of codes without it."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite value: 8 for e4m3, 15 for e5m2, 2 for e2m1."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    def magnitude(self, code: int) -> float:
        """The value of a code without its sign, exact in float64."""
        if code > self.max_code:
            return np.inf if code == self.infinity_code else np.nan
        exponent = code >> self.mantissa_bits
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        return float(np.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits))

    def table(self) -> Reals:
        """The values of all codes, positive ones first."""
        positive = [self.magnitude(code) for code in range(self.sign_bit)]
        return np.array(positive + [-value for value in positive])


FORMATS: dict[str, Format] = {
    "e4m3": Format(4, 3, bias=7, max_code=0x7E, nan_code=0x7F),
    "e5m2": Format(5, 2, bias=15, max_code=0x7B, nan_code=0x7E, infinity_code=0x7C),
    "e2m1": Format(2, 1, bias=1, max_code=0x7, nan_code=None),
}
_TABLES = {element: form.table() for element, form in FORMATS.items()}
_SCALES = np.array([np.ldexp(1.0, byte - SCALE_BIAS) for byte in range(SCALE_NAN)] + [np.nan])

# Names of the ml_dtypes types, which tell the element of an array that is not raw bytes.
_ELEMENT_OF_DTYPE = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}


def raw(array: AnyArray) -> Bytes:
    """The bytes of a one-byte array (uint8, int8, or an 8-bit ml_dtypes type), unchanged.

    Raises:
        TypeError: If the elements are not bytes, or are a float8 other than the OCP ones.
    """
    array = np.asarray(array)
    name = array.dtype.name
    if name in ("uint8", "int8", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2"):
        return np.ascontiguousarray(array).view(np.uint8)
    raise TypeError(f"expected raw bytes or an OCP float8 type but got {name}")


def unpack(packed: AnyArray) -> Bytes:
    """Two codes a byte, ``[..., K/2]``, to one a byte, ``[..., K]``; the low nibble is even k."""
    data = raw(packed)
    codes = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = data & 0xF, data >> 4
    return codes


def pack(codes: AnyArray) -> Bytes:
    """The inverse of ``unpack``; an odd K is filled up with a zero."""
    data = raw(codes)
    data: Bytes = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, data.shape[-1] % 2)])
    return data[..., 0::2] + data[..., 1::2] * np.uint8(16)


def decode(codes: AnyArray, element: Element = "e4m3") -> Reals:
    """The values of ``codes``, by table: e4m3 (e4m3fn), e5m2, or e2m1 packed two a byte.

    An ml_dtypes array says its own element (its e2m1 has one code a byte). Shapes are kept,
    but for packed e2m1: ``[..., K/2]`` becomes ``[..., K]``.
    """
    codes = np.asarray(codes)
    if codes.dtype.name == "float4_e2m1fn":
        return _TABLES["e2m1"][np.ascontiguousarray(codes).view(np.uint8) & 0xF]
    element = _ELEMENT_OF_DTYPE.get(codes.dtype.name, element)  # pyright: ignore[reportAssignmentType]
    return _TABLES[element][unpack(codes) if element == "e2m1" else raw(codes)]


def decode_scales(scales: AnyArray) -> Reals:
    """E8M0 bytes to 2^(byte - 127): 0 is 2^-127 (not zero), 255 is NaN."""
    return _SCALES[raw(scales)]


def encode(values: AnyArray, element: Element = "e4m3") -> Bytes:
    """Round to nearest even, saturating (infinities too); a NaN keeps its sign. One code a byte.

    Raises:
        ValueError: For a NaN in an element type that has none (e2m1).
    """
    form = FORMATS[element]
    values = np.asarray(values).astype(np.float64)
    grid = _TABLES[element][: form.max_code + 1]
    # Between neighbouring codes the midpoint is exact in float64, and the even code is the one
    # with the even mantissa, so nearest-even is: up past the midpoint, and on it if odd.
    midpoints = (grid[:-1] + grid[1:]) / 2
    magnitude = np.abs(values)
    nan = np.isnan(values)
    codes = np.searchsorted(midpoints, magnitude, side="left")
    tie = (codes < form.max_code) & (midpoints[np.minimum(codes, form.max_code - 1)] == magnitude)
    codes = codes + (tie & (codes % 2 == 1))
    if nan.any():
        if form.nan_code is None:
            raise ValueError(f"{element} has no NaN")
        codes = np.where(nan, form.nan_code, codes)
    return (codes | np.where(np.signbit(values), form.sign_bit, 0)).astype(np.uint8)


def round_to(values: AnyArray, kind: Kind) -> Reals:
    """Round float64 once to bf16, f16 or f32, nearest even, overflowing to infinity.

    The result holds the rounded values in float64. (Casting float64 through f32 to bf16, as
    array libraries do, would round twice.)
    """
    bits, min_exponent, max_exponent = {
        "bf16": (8, -126, 127),
        "f16": (11, -14, 15),
        "f32": (24, -126, 127),
    }[kind]
    values = np.asarray(values).astype(np.float64)
    finite = np.where(np.isfinite(values), values, 0.0)
    exponent = np.maximum(np.frexp(finite)[1] - 1, min_exponent)
    unit = exponent - (bits - 1)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(finite, -unit)), unit)
    largest = np.ldexp(2.0 - 2.0 ** (1 - bits), max_exponent)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)
    return np.where(np.isfinite(values), rounded, values)


def scale_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a ``rows x columns`` operand; the last blocks may be short."""
    return -(-rows // block[0]), -(-columns // block[1])


def expand(per_block: AnyArray, shape: tuple[int, int], block: tuple[int, int]) -> AnyArray:
    """One value a block to one a element: ``scale_shape(*shape, block)`` to ``shape``.

    A trailing axis of 1 is dropped, as some checkpoints have one.

    Raises:
        ValueError: If the scales have another shape.
    """
    expected = scale_shape(*shape, block)
    if per_block.shape not in (expected, (*expected, 1)):
        raise ValueError(f"expected scales of shape {expected} but got {per_block.shape}")
    per_block = per_block.reshape(expected)
    full = np.repeat(np.repeat(per_block, block[0], axis=0), block[1], axis=1)
    return full[: shape[0], : shape[1]]


def dequantize(
    operand: AnyArray,
    scales: AnyArray | None,
    block: tuple[int, int] = (1, BLOCK),
    element: Element = "e4m3",
) -> Reals:
    """The values ``[rows, K]`` of an operand and its E8M0 scales; a NaN scale is a NaN block.

    Without scales the operand is taken as it is, and may be of a wider float type (bf16, f16,
    f32, f64).
    """
    operand = np.asarray(operand)
    wide = operand.dtype.kind == "f" or operand.dtype.name == "bfloat16"
    values = operand.astype(np.float64) if wide else decode(operand, element)
    if values.ndim != 2:
        raise ValueError(f"expected an operand of 2 dimensions but got {values.ndim}")
    if scales is None:
        return values
    return values * expand(decode_scales(scales), (values.shape[0], values.shape[1]), block)


def scaled_matmul(
    x: AnyArray,
    x_scale: AnyArray | None,
    w: AnyArray,
    w_scale: AnyArray | None,
    *,
    rhs_block: tuple[int, int] = (BLOCK, BLOCK),
    lhs_element: Element = "e4m3",
    rhs_element: Element = "e4m3",
) -> Reals:
    """``x @ w^T`` in float64, ``[M, N]``, each block of 32 K times its two scales.

    Args:
        x: ``[M, K]`` codes (packed e2m1: ``[M, K/2]``), or values of a wider float type.
        x_scale: ``[M, ceil(K/32)]`` E8M0 bytes, or None for an unscaled x.
        w: ``[N, K]`` codes (packed e2m1: ``[N, K/2]``), or values of a wider float type.
        w_scale: E8M0 bytes, one a block of ``rhs_block``, or None for an unscaled w.
        rhs_block: Rows (N) and columns (K) that share a weight scale.
        lhs_element: The element type of raw bytes in x.
        rhs_element: The element type of raw bytes in w.

    A NaN scale makes NaN exactly the row (x) or the columns (w) that its block takes part in.
    The result is not rounded, and is finite where f32 overflows: see ``round_to``, ``compare``.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    left = dequantize(x, x_scale, (1, BLOCK), lhs_element)
    right = dequantize(w, w_scale, rhs_block, rhs_element)
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"x has K = {left.shape[1]} but w has K = {right.shape[1]}")
    with np.errstate(invalid="ignore"):  # infinities of e5m2 may meet a zero
        return left @ right.T


def grouped_matmul(
    x: AnyArray,
    x_scale: AnyArray | None,
    w: AnyArray,
    w_scale: AnyArray,
    offsets: AnyArray,
    expert_ids: AnyArray,
    init: AnyArray,
    *,
    rhs_block: tuple[int, int] = (BLOCK, BLOCK),
    lhs_element: Element = "e4m3",
    rhs_element: Element = "e4m3",
) -> Reals:
    """A matmul with a weight for each group of rows (mixture of experts) in float64, ``[M, N]``.

    Args:
        x: ``[M, K]``, as ``scaled_matmul`` takes it.
        x_scale: ``[M, ceil(K/32)]`` E8M0 bytes, or None for an unscaled x.
        w: ``[experts, N, K]`` codes (packed e2m1: ``[experts, N, K/2]``).
        w_scale: ``[experts, ...]``, for each expert what ``scaled_matmul`` takes.
        offsets: ``[groups + 1]`` rising row numbers; group g is rows offsets[g] to offsets[g + 1].
        expert_ids: ``[groups]``; an id that is no expert, such as -1, makes zeros.
        init: ``[M, N]``: the rows that belong to no group.
        rhs_block: Rows (N) and columns (K) that share a weight scale.
        lhs_element: The element type of raw bytes in x.
        rhs_element: The element type of raw bytes in w.
    """
    y = np.array(init, np.float64)
    for group, expert in enumerate(np.asarray(expert_ids).tolist()):
        rows = slice(int(offsets[group]), int(offsets[group + 1]))
        if not 0 <= expert < len(w):
            y[rows] = 0.0
            continue
        y[rows] = scaled_matmul(
            x[rows],
            None if x_scale is None else x_scale[rows],
            w[expert],
            w_scale[expert],
            rhs_block=rhs_block,
            lhs_element=lhs_element,
            rhs_element=rhs_element,
        )
    return y


def scale_exponent(amax: Reals, rule: Rule, form: Format) -> npt.NDArray[np.int64]:
    """The exponent of a block's scale for the largest magnitude in it (positive and finite).

    - rceil: the least power of two with which amax does not pass the element's largest value.
    - floor: the exponent of amax less that of the largest value (the OCP rule; may saturate).
    - ceil:  the same, with the exponent of amax rounded up.
    - even:  the same as floor, after rounding amax to the element's mantissa.
    """
    fraction, exponent = np.frexp(amax)
    significand, exponent = fraction * 2, exponent.astype(np.int64) - 1  # significand in [1, 2)
    if rule == "rceil":
        largest = form.magnitude(form.max_code) / 2.0**form.max_exponent
        exponent = exponent + (significand > largest)
    elif rule == "ceil":
        exponent = exponent + (significand > 1)
    elif rule == "even":
        steps = 2.0**form.mantissa_bits
        exponent = exponent + (np.rint(significand * steps) / steps >= 2)
    elif rule != "floor":
        raise ValueError(f"unknown rule {rule!r}; expected rceil, floor, ceil or even")
    return exponent - form.max_exponent


def quantize_weight(
    w: AnyArray,
    block: tuple[int, int] = (BLOCK, BLOCK),
    rule: Rule = "rceil",
    element: Element = "e4m3",
) -> tuple[Bytes, Bytes]:
    """Quantise ``[N, K]`` values: codes ``[N, K]``, and an E8M0 byte a block, ``scale_shape``.

    With ``amax = max(max|w|, 2^-126)`` over a block (values are rounded to f32 first; NaNs are
    passed over): ``byte = clamp(exponent + 127, 0, 254)``, ``code = encode(w * 2^(127 - byte))``.
    This is the rule of vLLM's MX quantiser, and so of the kernels.

    - A block of zeros has byte 0. Finite input never has a byte above 247 (e4m3).
    - An infinity makes the byte 254 and saturates; its block's other values stay finite.
    - A NaN stays a NaN, alone. e2m1 has none: there the byte is 255, all of the block's codes 0.

    e2m1 codes come packed, ``[N, ceil(K/2)]``.
    """
    form = FORMATS[element]
    with np.errstate(over="ignore"):
        values = np.asarray(w).astype(np.float32).astype(np.float64)
    if values.ndim != 2:
        raise ValueError(f"expected values of 2 dimensions but got {values.ndim}")
    shape = (values.shape[0], values.shape[1])
    grid = scale_shape(*shape, block)
    nan = np.isnan(values)
    padded = np.zeros((grid[0] * block[0], grid[1] * block[1]))
    padded[: shape[0], : shape[1]] = np.where(nan, 0.0, np.abs(values))
    blocks = padded.reshape(grid[0], block[0], grid[1], block[1])
    amax = np.maximum(blocks.max(axis=(1, 3), initial=0.0), 2.0**-126)
    infinite = np.isinf(amax)
    exponent = scale_exponent(np.where(infinite, 1.0, amax), rule, form)
    scales = np.where(infinite, SCALE_MAX, np.clip(exponent + SCALE_BIAS, 0, SCALE_MAX))
    if form.nan_code is None and nan.any():
        # `blocks` is a view of `padded`: reuse it to find the blocks that hold a NaN.
        padded[: shape[0], : shape[1]] = nan
        scales = np.where(blocks.any(axis=(1, 3)), SCALE_NAN, scales)
        values = np.where(expand(scales, shape, block) == SCALE_NAN, 0.0, values)
    inverse = np.ldexp(1.0, SCALE_BIAS - expand(scales, shape, block).astype(np.int64))
    codes = encode(values * inverse, element)
    return pack(codes) if element == "e2m1" else codes, scales.astype(np.uint8)


def quantize(x: AnyArray, rule: Rule = "rceil", element: Element = "e4m3") -> tuple[Bytes, Bytes]:
    """Quantise activations ``[..., K]``, one scale a row and 32 K: codes and E8M0 bytes.

    ``quantize_weight`` says the rule. Codes are ``[..., K]`` (e2m1: packed, ``[..., ceil(K/2)]``),
    scales ``[..., ceil(K/32)]``.
    """
    x = np.asarray(x)
    rows = int(np.prod(x.shape[:-1]))
    codes, scales = quantize_weight(x.reshape(rows, x.shape[-1]), (1, BLOCK), rule, element)
    lead = x.shape[:-1]
    return codes.reshape(*lead, codes.shape[1]), scales.reshape(*lead, scales.shape[1])


# Elementwise relative tolerance against float64; on top of it, ABSOLUTE_TOLERANCE x the peak.
RELATIVE_TOLERANCE: dict[str, float] = {"bf16": 0.016, "f16": 0.002, "f32": 3e-5}
ABSOLUTE_TOLERANCE = 5e-5
FROBENIUS_TOLERANCE = 5e-3


@dataclass(frozen=True)
class Comparison:
    """How far a result lies from the reference. ``str()`` is one line for an assertion."""

    kind: str
    ok: bool
    relative_frobenius: float
    """Frobenius norm of the error over that of the reference, over the finite elements."""
    max_error_over_peak: float
    """Largest absolute error over the reference's largest magnitude."""
    mismatches: int
    """Elements past the tolerance, or NaN or infinite where the reference is not (or else)."""
    elements: int
    first_mismatch: tuple[int, ...] | None
    detail: str

    def __str__(self) -> str:
        text = (
            f"{self.kind}: {'ok' if self.ok else 'MISMATCH'}, relative Frobenius "
            f"{self.relative_frobenius:.3g}, max error / peak {self.max_error_over_peak:.3g}, "
            f"{self.mismatches} of {self.elements} elements off"
        )
        return f"{text}; {self.detail}" if self.detail else text


def compare(got: AnyArray, want: AnyArray, kind: Kind) -> Comparison:
    """Compare a kernel's result of type ``kind`` with float64 ``want``.

    Each element has to be within rtol x |want| + 5e-5 x peak (rtol 0.016 for bf16, 0.002 for
    f16, 3e-5 for f32), NaN where the reference is, infinite where the reference rounds to an
    infinity; and the relative Frobenius norm below 5e-3.

    Raises:
        ValueError: If the shapes differ.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"expected a result of shape {want.shape} but got {got.shape}")
    rounded = round_to(want, kind)
    finite = np.isfinite(rounded)
    same_special = (np.isnan(got) & np.isnan(rounded)) | (got == rounded)
    reference = np.where(finite, want, 0.0)
    comparable = finite & np.isfinite(got)
    error = np.abs(np.where(comparable, got, reference) - reference)
    peak = float(np.max(np.abs(reference), initial=0.0))
    norm = float(np.linalg.norm(reference))
    error_norm = float(np.linalg.norm(error))
    frobenius = error_norm / norm if norm else (np.inf if error_norm else 0.0)
    tolerance = RELATIVE_TOLERANCE[kind] * np.abs(reference) + ABSOLUTE_TOLERANCE * peak
    bad = np.where(finite, ~comparable | (error > tolerance), ~same_special)
    first = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None
    largest = float(np.max(error, initial=0.0))
    return Comparison(
        kind=kind,
        ok=first is None and frobenius < FROBENIUS_TOLERANCE,
        relative_frobenius=frobenius,
        max_error_over_peak=largest / peak if peak else (np.inf if largest else 0.0),
        mismatches=int(bad.sum()),
        elements=got.size,
        first_mismatch=first,
        detail="" if first is None else f"at {first} expected {want[first]!r} got {got[first]!r}",
    )
