# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# pyright: reportMissingImports=false, reportPrivateImportUsage=false
"""Running compiled modules on a card through the IREE runtime: operands, checks, times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import iree.runtime as rt
import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DTYPES: dict[str, Any] = {
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f4E2M1FN": np.uint8,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
}

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

#: Operands with a row for each row of y.
ROWED = frozenset({"lhs", "lhs_scale", "row_scale", "residual"})

#: Error of a result against |x| |w|: f32 sums, and sums in which a block of 32 was short.
EXACT_TOLERANCE = 2e-6
SHORT_TOLERANCE = 3e-4

#: Half a unit in the last place of the result's type.
_ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


def uses_short_sums(entry: dict[str, Any], m: int) -> bool:
    """Whether the tier that serves ``m`` rows is one on ``wgmma``."""
    tier = next(t for t in entry["tiers"] if t.get("max_m") is None or m <= t["max_m"])
    return tier.get("mma", [16])[0] == 64


@cache
def shared_config(device: str) -> rt.Config:
    """The card, opened once: modules on it can share arrays."""
    return rt.Config(device)


class CardModule:
    """A compiled module on the card, in a context of its own."""

    #: The runtime's name of the card.
    device = "cuda"

    def __init__(self, path: Path, config: rt.Config | None = None):
        """Load the vmfb; ``config`` is a card opened for it alone."""
        self.config = config or shared_config(self.device)
        self.module = rt.load_vm_module(
            rt.VmModule.copy_buffer(self.config.vm_instance, path.read_bytes()), self.config
        )

    def to_card(self, array: Array) -> Any:
        """A copy of an array on the card."""
        return rt.asdevicearray(self.config.device, np.ascontiguousarray(array))

    def call(self, arguments: Sequence[Any], function: str = "main") -> Any:
        """Call a function and wait until it is done."""
        return self.module[function](*arguments)


@dataclass
class Operands:
    """Random operands of a problem as arrays, and what they decode to in float64."""

    problem: dict[str, Any]
    m: int
    arrays: dict[str, Array]

    def in_order(self) -> list[Array]:
        """As the compiled function takes them."""
        return list(self.arrays.values())


def random_operands(problem: dict[str, Any], m: int, seed: int) -> Operands:
    """Normal values of every magnitude that a scale of 2^-9 to 2^8 gives."""
    rng = np.random.default_rng(seed)
    n, k, blocks = problem["n"], problem["k"], -(-problem["k"] // 32)
    block_n = problem["rhs_block"][0]
    experts = problem["grouping"]["experts"] if problem["grouping"] else 1
    arrays = {
        "lhs": _random_values(rng, m, k, problem["lhs"]),
        "rhs": _random_values(rng, experts * n, k, problem["rhs"]),
    }
    if problem["lhs_scaled"]:
        arrays["lhs_scale"] = _random_scales(rng, (m, blocks), problem)
    arrays["rhs_scale"] = _random_scales(rng, (experts * -(-n // block_n), blocks), problem)
    epilogue = problem["epilogue"]
    if epilogue["row_scale"]:
        arrays["row_scale"] = rng.uniform(0.5, 2, m).astype(np.float32)
    if epilogue["scale"]:
        arrays["scale"] = rng.uniform(0.5, 2, 1).astype(np.float32)
    if epilogue["bias"]:
        arrays["bias"] = rng.standard_normal(n).astype(_DTYPES[epilogue["bias"]])
    if epilogue["residual"]:
        arrays["residual"] = rng.standard_normal((m, n)).astype(_DTYPES[epilogue["residual"]])
    return Operands(problem, m, arrays)


def grouped_operands(
    problem: dict[str, Any], groups: Sequence[tuple[int, int]], seed: int
) -> Operands:
    """Operands of groups of (tokens, expert), with two rows of no group before and behind them."""
    m = sum(tokens for tokens, _ in groups) + 4
    operands = random_operands(problem, m, seed)
    arrays, experts = operands.arrays, problem["grouping"]["experts"]
    for name in ("rhs", "rhs_scale"):
        arrays[name] = arrays[name].reshape(experts, -1, arrays[name].shape[1])
    offsets = 2 + np.cumsum([0, *(tokens for tokens, _ in groups)])
    arrays["offsets"] = offsets.astype(np.int32)
    arrays["expert_ids"] = np.array([expert for _, expert in groups], np.int32)
    rng = np.random.default_rng(seed)
    arrays["init"] = rng.standard_normal((m, problem["n"])).astype(_DTYPES[problem["result"]])
    return operands


def grouped_expected(operands: Operands, matmul: Matmul) -> tuple[Array, Array]:
    """The result of groups in float64, and the |x| |w| that errors are measured by."""
    arrays = operands.arrays
    want = arrays["init"].astype(np.float64)
    magnitudes = np.ones_like(want)
    rows = {name: arrays[name] for name in ("lhs", "lhs_scale") if name in arrays}
    if operands.problem["lhs_quantize"]:
        rows["lhs"], rows["lhs_scale"] = quantized(arrays["lhs"])
    for group, expert in enumerate(arrays["expert_ids"].tolist()):
        own = slice(*arrays["offsets"][group : group + 2].tolist())
        if not 0 <= expert < len(arrays["rhs"]):
            want[own] = 0
        elif own.start < own.stop:
            part = {name: array[own] for name, array in rows.items()}
            part |= {name: arrays[name][expert] for name in ("rhs", "rhs_scale")}
            scaled = operands.problem | {"lhs_scaled": "lhs_scale" in part}
            want[own], magnitudes[own] = expected(Operands(scaled, 0, part), matmul)
    return want, magnitudes


def _random_values(rng: np.random.Generator, rows: int, k: int, element: str) -> Array:
    if element == "f4E2M1FN":
        return rng.integers(0, 256, (rows, -(-k // 2)), dtype=np.uint8).view(np.int8)
    return rng.standard_normal((rows, k), dtype=np.float32).astype(_DTYPES[element])


def _random_scales(rng: np.random.Generator, shape: tuple[int, ...], problem: dict) -> Array:
    """Scale bytes; in a narrow range where the result type is narrow."""
    low, high = (124, 128) if problem["result"] == "f16" else (118, 136)
    return rng.integers(low, high, shape, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)


def decode_scales(scales: Array) -> Array:
    """2^(byte - 127) in float64, NaN for 255."""
    codes = scales.view(np.uint8).astype(np.float64)
    return np.where(codes == 255, np.nan, np.exp2(codes - 127))


def decoded(operands: Operands) -> tuple[Array, Array]:
    """X and w in float64, scaled."""
    problem, arrays = operands.problem, operands.arrays
    k = problem["k"]
    x = _decode(arrays["lhs"], k, problem["lhs"])
    w = _decode(arrays["rhs"], k, problem["rhs"])
    if problem["lhs_scaled"]:
        x = x * np.repeat(decode_scales(arrays["lhs_scale"]), 32, axis=1)[:, :k]
    by_row = np.repeat(decode_scales(arrays["rhs_scale"]), problem["rhs_block"][0], axis=0)
    return x, w * np.repeat(by_row[: problem["n"]], 32, axis=1)[:, :k]


def _decode(values: Array, k: int, element: str) -> Array:
    if element != "f4E2M1FN":
        return values.astype(np.float64)
    codes = values.view(np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return _E2M1[nibbles[:, :k]]


Matmul = Callable[[Array, Array], Array]


def expected(operands: Operands, matmul: Matmul) -> tuple[Array, Array]:
    """The result in float64, and the |x| |w| that errors are measured by."""
    x, w = decoded(operands)
    result, magnitude = matmul(x, w.T), matmul(np.abs(x), np.abs(w).T)
    arrays, epilogue = operands.arrays, operands.problem["epilogue"]
    if epilogue["row_scale"]:
        factor = arrays["row_scale"].astype(np.float64)[:, None]
        result, magnitude = result * factor, magnitude * factor
    if epilogue["scale"]:
        factor = float(arrays["scale"][0])
        result, magnitude = result * factor, magnitude * factor
    if epilogue["bias"]:
        result = result + arrays["bias"].astype(np.float64)
    if epilogue["residual"]:
        result = result + arrays["residual"].astype(np.float64)
    if epilogue["activation"] == "silu":
        with np.errstate(over="ignore"):
            result = result / (1 + np.exp(-result))
    return result, magnitude + 1


def quantized(x: Array) -> tuple[Array, Array]:
    """Codes and scale bytes of x by the rule ``rceil``: the smallest scale that saturates nothing.

    ``x`` is [M, K], its blocks neither zero nor near the ends of f32's range.
    """
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % 32)))
    blocks = padded.reshape(len(x), -1, 32)
    mantissa, exponent = np.frexp(np.abs(blocks).max(axis=2) / 448)
    exponent -= mantissa == 0.5
    codes = np.ldexp(blocks, -exponent[..., None]).astype(ml_dtypes.float8_e4m3fn)
    codes = codes.reshape(len(x), -1)[:, : x.shape[1]]
    return np.ascontiguousarray(codes), (exponent + 127).astype(np.uint8)


def float64_matmul() -> Matmul:
    """On the card through torch where there is torch, else NumPy."""
    try:
        import torch
    except ImportError:
        return np.matmul

    def matmul(a: Array, b: Array) -> Array:
        left, right = (torch.from_numpy(np.ascontiguousarray(v)).cuda() for v in (a, b))
        return (left @ right).cpu().numpy()

    return matmul


def relative_error(result: Array, want: Array, magnitude: Array, element: str) -> float:
    """The largest error, beyond the one rounding of the result, over |x| |w|."""
    error = np.abs(result.astype(np.float64) - want) - np.abs(want) * _ROUNDING[element]
    worst = float(np.max(error / magnitude))
    return float("inf") if np.isnan(worst) else worst


def same_bits(a: Array, b: Array) -> bool:
    """Bitwise equality, NaNs included."""
    return a.tobytes() == b.tobytes()


def run_in_threads(path: Path, operands: Operands, threads: int, calls: int) -> list[Array]:
    """The last result of each of several host threads, each with a context of its own.

    Each thread opens the card for itself: the driver keeps its current context by thread, and
    IREE makes it current in the thread that opens a device and in no other.
    """

    def work(_: int) -> Array:
        device = rt.get_device(CardModule.device, cache=False)
        module = CardModule(path, rt.Config(device=device))
        arguments = [module.to_card(array) for array in operands.in_order()]
        for _ in range(calls - 1):
            module.call(arguments)
        return module.call(arguments).to_host()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(threads)))


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        device: On the card's clock; the same as ``wall`` where torch, which reads it, is missing.
        wall: On the host's. For short kernels longer, since IREE records a batch before it plays
            it, and recording takes 3 to 4 us a call.
    """

    device: float
    wall: float


def time_module(entry: dict[str, Any], folder: Path, repeats: int = 25) -> Timing:
    """The time of one call of the module's timing functions.

    The two make few and many calls, each with a weight of its own out of more weights than the
    card's cache holds. On the card's clock it is the time from the call after the few to the end,
    by the calls between; on the host's the difference of the two functions' medians.
    """
    module = CardModule(folder / entry["file"])
    few, many = entry["batches"]
    arguments = _timing_operands(TimedShape.of(entry))
    medians = []
    for function in ("short", "long"):
        module.call(arguments, function)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            module.call(arguments, function)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    wall = (medians[1] - medians[0]) * 1e6 / (many - few)
    try:
        spans = [_device_span(module, arguments, few, many) for _ in range(7)]
    except ImportError:
        return Timing(wall, wall)
    return Timing(statistics.median(spans), wall)


@cache
def _busy_array() -> Any:
    """4 GB on the card."""
    import torch

    return torch.zeros(1 << 30, device="cuda")


def _device_span(module: CardModule, arguments: Sequence[Any], few: int, many: int) -> float:
    """Microseconds a call on the card, gaps between kernels included, after the first ``few``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    # Keeps the card busy for 2 ms, while the host launches all calls: then they run without gaps.
    busy = _busy_array()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        busy.sin_()
        module.call(arguments, "long")
        torch.cuda.synchronize()
    on_card = torch.autograd.DeviceType.CUDA
    events = [event for event in record.events() or [] if event.device_type == on_card]
    spans = [event.time_range for event in events if "elementwise" not in event.name]
    spans.sort(key=lambda span: span.start)
    assert spans and len(spans) % many == 0, f"{len(spans)} kernels for {many} calls"
    first = spans[len(spans) // many * few]
    return (spans[-1].end - first.start) / (many - few)


@dataclass(frozen=True)
class TimedShape:
    """What the operands of a timing batch depend on; ``is_quantized``: its calls quantise x."""

    m: int
    n: int
    k: int
    lhs: str
    is_scaled: bool
    is_quantized: bool
    calls: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> TimedShape:
        """The shape of a manifest's entry."""
        problem = entry["problem"]
        return cls(
            entry["rows"][0],
            problem["n"],
            problem["k"],
            problem["lhs"],
            problem["lhs_scaled"],
            bool(problem["lhs_quantize"]),
            max(entry["batches"]),
        )


@lru_cache(maxsize=1)
def _timing_operands(shape: TimedShape) -> list[Any]:
    """X, its scales if any, and a weight and its scales for each call: 180 MB of them, in turn."""
    m, n, k, calls = shape.m, shape.n, shape.k, shape.calls
    rng = np.random.default_rng(1)
    device = shared_config(CardModule.device).device

    def on_card(codes: Array, dtype: Any) -> Any:
        return rt.asdevicearray(device, codes.view(dtype))

    def fp8(rows: int) -> Any:
        codes = rng.integers(0, 256, (rows, k), dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x2A  # no NaN
        return on_card(codes, ml_dtypes.float8_e4m3fn)

    def scales(rows: int) -> Any:
        codes = rng.integers(118, 136, (rows, -(-k // 32)), dtype=np.uint8)
        return on_card(codes, ml_dtypes.float8_e8m0fnu)

    distinct = min(calls, max(2, -(-(180 << 20) // (n * k))))
    weights = [fp8(n) for _ in range(distinct)]
    weight_scales = [scales(-(-n // 32)) for _ in range(distinct)]
    turns = [i % distinct for i in range(calls)]
    if shape.is_scaled:
        x = [fp8(m), scales(m)]
    else:
        values = rng.standard_normal((m, k), dtype=np.float32).astype(_DTYPES[shape.lhs])
        distinct_x = calls if shape.is_quantized else 1
        x = [rt.asdevicearray(device, values) for _ in range(distinct_x)]
    return [
        *x,
        *(weights[turn] for turn in turns),
        *(weight_scales[turn] for turn in turns),
    ]
