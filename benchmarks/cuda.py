# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels on an NVIDIA card: are they right, how fast are they, which configuration is best.

    python benchmarks/cuda.py --build     compile everything into build/cuda; needs no card
    python benchmarks/cuda.py --check     every form and shape against float64
    python benchmarks/cuda.py             times beside Triton's, torch's and the copy bandwidth
    python benchmarks/cuda.py --unscaled  times of bf16, f16 and f32 activations beside torch's
    python benchmarks/cuda.py --tune      times of candidate configurations

Everything but ``--build`` needs a card and the IREE runtime, and no compiler: the folder can be
carried to a machine that has no more. Checking uses torch where it is installed, for speed; the
yardsticks need torch and triton.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cuda_card as card
import numpy as np
from cuda_plot import bytes_read, draw_comparison

FOLDER = Path(__file__).parent.parent / "build" / "cuda"

Entry = dict[str, Any]


def main() -> int:
    """The command line; 1 where a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--build", action="store_true", help="compile, without running anything")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--unscaled", action="store_true", help="time activations without scales")
    parser.add_argument("--tune", action="store_true", help="time candidate configurations")
    parser.add_argument("--quick", action="store_true", help="check a few modules, few rows")
    parser.add_argument("--table", type=Path, help="with --tune: write the best as tuned.toml")
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the modules are")
    parser.add_argument("--device", default="cuda", help="the runtime's name of the card")
    parser.add_argument("--plot", type=Path, help="draw the times (needs the extra `plot`)")
    parser.add_argument("--output", type=Path, help="write results as JSON")
    options = parser.parse_args()
    if options.build:
        from cuda_modules import compile_all

        compile_all(options.folder, options.only)
        return 0
    card.CardModule.device = options.device
    results: list[Entry] = []
    if options.check:
        kinds = ("check", "dynamic", "grouped")
        entries = [entry for kind in kinds for entry in _entries(options, kind)]
        results = list(_check(entries, options))
    elif options.tune:
        results = list(_time(_entries(options, "tune"), options.folder))
        best = _best(results)
        if options.table:
            options.table.write_text(_tuned_table(best))
    elif options.unscaled:
        results = list(_compare_unscaled(_entries(options, "unscaled"), options.folder))
    else:
        results = list(_compare(_entries(options, "timed"), options.folder))
    if options.plot:
        draw_comparison([r for r in results if "shape" in r], options.plot)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    failures = [r for r in results if not r.get("passed", True)]
    for failure in failures:
        print(f"FAILED {failure['name']}: {failure['message']}")
    print(f"{len(results) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures else 0


def _entries(options: argparse.Namespace, kind: str) -> list[Entry]:
    manifest = options.folder / "manifest.json"
    if not manifest.exists():
        sys.exit(f"{manifest}: no modules; make them with: python benchmarks/cuda.py --build")
    entries = [e for e in json.loads(manifest.read_text()) if e["kind"] == kind]
    return [entry for entry in entries if options.only in entry["name"]]


# Checks.


def _check(entries: list[Entry], options: argparse.Namespace) -> Iterator[Entry]:
    """One result a check; a check that raises has failed, and the others go on."""
    matmul = card.float64_matmul()
    checks: list[tuple[str, Callable[[], str]]] = [
        (f"shapes {e['name']}", partial(_check_shapes, e, options, matmul))
        for e in entries
        if e["kind"] == "check"
    ]
    if options.quick:
        checks = checks[::6]
    for entry in entries:
        if entry["name"].startswith("split") and entry["name"].endswith("in_launch"):
            checks.append((f"repeats {entry['name']}", partial(_check_repeats, entry, options)))
        if entry["kind"] == "dynamic":
            checks.append((entry["name"], partial(_check_dynamic, entry, options)))
        if entry["kind"] == "grouped":
            checks.append((entry["name"], partial(_check_grouped, entry, options, matmul)))
        if "5120x1152" in entry["name"]:
            checks.append((f"scales {entry['name']}", partial(_check_scales, entry, options)))
    # Last, since an empty buffer that does reach the card breaks it for the whole process.
    for entry in [e for e in entries if "5120x1152" in e["name"]][:1]:
        checks.append((f"no rows {entry['name']}", partial(_check_no_rows, entry, options)))
    for name, check in checks:
        start = time.perf_counter()
        try:
            message, passed = check(), True
        except Exception as error:
            traceback.print_exc()
            message, passed = f"{type(error).__name__}: {error}", False
        seconds = time.perf_counter() - start
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {message} ({seconds:.1f} s)", flush=True)
        yield {"name": name, "passed": passed, "message": message}


def _check_shapes(entry: Entry, options: argparse.Namespace, matmul: card.Matmul) -> str:
    """Right at every number of rows, and the same twice."""
    module = card.CardModule(options.folder / entry["file"])
    rows = entry["rows"][:3] if options.quick else entry["rows"]
    operands = card.random_operands(entry["problem"], max(rows), seed=1)
    all_wanted, all_magnitudes = card.expected(operands, matmul)
    shared = {name: module.to_card(array) for name, array in operands.arrays.items()}
    worst: dict[bool, float] = {}
    for m in rows:
        own = {n: module.to_card(operands.arrays[n][:m]) for n in card.ROWED & shared.keys()}
        arguments = list((shared | own).values())
        result = module.call(arguments).to_host()
        again = module.call(arguments).to_host()
        assert card.same_bits(result, again), f"M = {m}: two runs differ"
        element = entry["problem"]["result"]
        error = card.relative_error(result, all_wanted[:m], all_magnitudes[:m], element)
        is_short = card.uses_short_sums(entry, m)
        worst[is_short] = max(worst.get(is_short, 0.0), error)
        limit = card.SHORT_TOLERANCE if is_short else card.EXACT_TOLERANCE
        assert error <= limit, f"M = {m}: error {error:.3g} of |x| |w|, above {limit}"
    parts = [f"{'short' if s else 'f32'} sums {error:.2g}" for s, error in worst.items()]
    return f"M {', '.join(map(str, rows))}: " + ", ".join(parts)


def _check_repeats(entry: Entry, options: argparse.Namespace) -> str:
    """Bitwise equal over many runs, and in eight threads at once; both reductions agree."""
    path = options.folder / entry["file"]
    m = entry["rows"][1]
    operands = card.random_operands(entry["problem"], m, seed=7)
    module = card.CardModule(path)
    arguments = [module.to_card(array) for array in operands.in_order()]
    first = module.call(arguments).to_host()
    runs = 20 if options.quick else 1000
    for run in range(runs):
        assert card.same_bits(first, module.call(arguments).to_host()), f"run {run} differs"
    for result in card.run_in_threads(path, operands, threads=8, calls=5 if options.quick else 50):
        assert card.same_bits(first, result), "a thread's result differs"
    other = Path(str(path).replace("in_launch", "second_launch"))
    module = card.CardModule(other)
    arguments = [module.to_card(array) for array in operands.in_order()]
    assert card.same_bits(first, module.call(arguments).to_host()), "the reductions differ"
    return f"M {m}: {runs} runs, 8 threads and both reductions equal"


def _check_dynamic(entry: Entry, options: argparse.Namespace) -> str:
    """An x quantised with the matmul: y bit for bit as after IREE's own code quantised it.

    That code is held against the rule, and its codes against the kernel that takes codes.
    """
    dynamic = card.CardModule(options.folder / entry["file"])
    before = card.CardModule(options.folder / entry["file"].replace("dynamic", "quantized"))
    for m in entry["rows"]:
        operands = card.random_operands(entry["problem"], m, seed=5)
        x, w, w_scale = (before.to_card(array) for array in operands.in_order())
        y, codes, scales = before.call([x, w, w_scale])
        want_codes, want_scales = card.quantized(operands.arrays["lhs"])
        assert card.same_bits(want_scales, scales.to_host()), f"M = {m}: other scales"
        assert card.same_bits(want_codes, codes.to_host()), f"M = {m}: other codes"
        again = before.call([codes, w, scales, w_scale], "matmul").to_host()
        assert card.same_bits(y.to_host(), again), f"M = {m}: another y"
        fused = dynamic.call([x, w, w_scale]).to_host()
        assert card.same_bits(y.to_host(), fused), f"M = {m}: another y where x is quantised late"
    return f"M {', '.join(map(str, entry['rows']))}: codes, scales and y bit for bit"


def _check_grouped(entry: Entry, options: argparse.Namespace, matmul: card.Matmul) -> str:
    """Each group with its expert's weight; rows of no group keep their bits."""
    module = card.CardModule(options.folder / entry["file"])
    operands = card.grouped_operands(entry["problem"], entry["groups"], seed=2)
    arguments = [module.to_card(array) for array in operands.in_order()]
    y = module.call(arguments).to_host()
    assert card.same_bits(y, module.call(arguments).to_host()), "two runs differ"
    for row in (0, 1, len(y) - 2, len(y) - 1):
        assert card.same_bits(y[row], operands.arrays["init"][row]), f"row {row} is of no group"
    want, magnitudes = card.grouped_expected(operands, matmul)
    error = card.relative_error(y, want, magnitudes, entry["problem"]["result"])
    is_short = card.uses_short_sums(entry, len(y))
    limit = card.SHORT_TOLERANCE if is_short else card.EXACT_TOLERANCE
    assert error <= limit, f"error {error:.3g} of |x| |w|, above {limit}"
    return f"{len(y)} rows: {'short' if is_short else 'f32'} sums {error:.2g}"


def _check_scales(entry: Entry, options: argparse.Namespace) -> str:
    """Scales of 2^-127 against 2^127 are exact; one NaN scale makes one row NaN."""
    module = card.CardModule(options.folder / entry["file"])
    for m in (1, 8, 33, 129):
        operands = card.random_operands(entry["problem"], m, seed=3)
        arrays = operands.arrays
        arrays["lhs"][...] = 1
        arrays["rhs"][...] = 1
        lhs_scale, rhs_scale = (arrays[n].view(np.uint8) for n in ("lhs_scale", "rhs_scale"))
        for a, b in ((254, 0), (0, 254), (1, 253), (127, 127)):
            lhs_scale[...], rhs_scale[...] = a, b
            result = _run(module, operands)
            want = entry["problem"]["k"] * 2.0 ** (a + b - 254)
            assert (result == want).all(), f"M = {m}: scales {a}, {b}: {result.flat[0]}, not {want}"
        lhs_scale[m // 2, 2] = 255
        is_nan = np.isnan(_run(module, operands))
        assert is_nan[m // 2].all(), f"M = {m}: a NaN scale is lost"
        assert is_nan.sum() == is_nan.shape[1], f"M = {m}: a NaN scale reaches other rows"
        lhs_scale[...] = 127
        rhs_scale[3, 1] = 255
        is_nan = np.isnan(_run(module, operands))
        assert is_nan[:, 96:128].all(), f"M = {m}: a weight's NaN scale is lost"
        assert is_nan.sum() == 32 * m, f"M = {m}: a weight's NaN scale reaches other columns"
    return "254 and 0, 0 and 254, 1 and 253, NaN"


def _run(module: card.CardModule, operands: card.Operands) -> np.ndarray:
    return module.call([module.to_card(array) for array in operands.in_order()]).to_host()


def _check_no_rows(entry: Entry, options: argparse.Namespace) -> str:
    """M = 0 gives no rows, and the device still works."""
    module = card.CardModule(options.folder / entry["file"])
    operands = card.random_operands(entry["problem"], 4, seed=1)
    before = _run(module, operands)
    empty = {n: a[:0] if n.startswith("lhs") else a for n, a in operands.arrays.items()}
    arguments = [module.to_card(array) for array in empty.values()]
    # Not `to_host`: the runtime cannot import an empty array's memory.
    shape = tuple(module.call(arguments).shape)
    assert shape == (0, entry["problem"]["n"]), f"got {shape}"
    assert card.same_bits(before, _run(module, operands)), "the device is broken after M = 0"
    return "no rows, and the next call is right"


# Times.


def _time(entries: list[Entry], folder: Path) -> Iterator[Entry]:
    for entry in entries:
        result = {"name": entry["name"], "rows": entry["rows"], "tiers": entry["tiers"]}
        try:
            timing = card.time_module(entry, folder)
            result |= {"us": timing.device, "wall_us": timing.wall}
            times = f"{timing.device:9.2f} us  (wall {timing.wall:.2f})"
            print(f"{times}  {entry['name']}  {_describe(entry)}", flush=True)
        except Exception as error:
            result |= {"passed": False, "message": f"{type(error).__name__}: {error}"}
            print(f"   failed  {entry['name']}  {_describe(entry)}: {error}", flush=True)
        yield result


def _describe(entry: Entry) -> str:
    """The tier that runs, as fields."""
    (m,) = entry["rows"]
    tier = next(t for t in entry["tiers"] if t.get("max_m") is None or m <= t["max_m"])
    return " ".join(f"{name}={value}" for name, value in tier.items() if name != "max_m")


def _best(results: list[Entry]) -> list[Entry]:
    """The fastest of each shape; prints the three fastest."""
    shapes: dict[str, list[Entry]] = {}
    for result in results:
        if "us" in result:
            shapes.setdefault(result["name"].split("_")[1], []).append(result)
    best = []
    for shape, candidates in shapes.items():
        print(shape)
        candidates.sort(key=lambda r: r["us"])
        for result in candidates[:3]:
            print(f"  {result['us']:9.2f} us  {json.dumps(result['tiers'][0])}")
        best.append(candidates[0])
    return best


def _tuned_table(best: list[Entry]) -> str:
    """The text of ``lowering/nvidia/tuned.toml``; what is best at M > 1024 serves all above."""
    comment = [
        "# Part of block32, under the Apache License v2.0 with LLVM Exceptions.",
        "# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception",
        "# Configurations by weight shape for sm_90a, each for M up to its `max_m`; the last may",
        "# have none. Between and beyond them the defaults of select.py hold.",
        "#",
        "# Written by `benchmarks/cuda.py --tune --table=lowering/nvidia/tuned.toml` on an H200.",
    ]
    lines = comment
    shapes: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
    for result in best:
        m, n, k = map(int, result["name"].split("_")[1].split("x"))
        shapes.setdefault((n, k), []).append((m, result["tiers"][0]))
    for (n, k), tiers in sorted(shapes.items()):
        lines += ["", "[[shapes]]", f"n = {n}", f"k = {k}", "tiers = ["]
        for m, tier in sorted(tiers, key=lambda pair: pair[0]):
            fields = ({} if m > 1024 else {"max_m": m}) | tier
            text = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
            lines.append(f"  {{ {text} }},")
        lines.append("]")
    return "\n".join(lines) + "\n"


def _compare(entries: list[Entry], folder: Path) -> Iterator[Entry]:
    """Ours, then the yardsticks of each shape, and the table."""
    ours: dict[tuple[int, int, int], Entry] = {}
    for entry, result in zip(entries, _time(entries, folder), strict=True):
        key = (entry["rows"][0], entry["problem"]["n"], entry["problem"]["k"])
        ours.setdefault(key, {})[entry["target"]] = result.get("us", float("nan"))
        yield result
    import cuda_triton as yardstick
    import torch  # pyright: ignore[reportMissingImports]

    bandwidth = yardstick.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.2f} TB/s, {time.strftime('%Y-%m-%d')}")
    print(
        "| M, N, K | sm_90a | sm_90a-f32 | Triton | form | torch bf16 | torch fp8 | TB/s, of copy |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (m, n, k), times in ours.items():
        others = _yardsticks(m, n, k)
        read = bytes_read(m, n, k) / min(times.values()) / 1e6
        cells = [
            f"{m}, {n}, {k}",
            *(f"{times.get(t, float('nan')):.2f}" for t in ("sm_90a", "sm_90a-f32")),
            f"{others['triton'][0]:.2f}",
            others["triton"][1],
            f"{others['bf16']:.2f}",
            f"{others['fp8']:.2f}",
            f"{read:.2f}, {read / bandwidth:.2f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        others["triton"], others["triton_form"] = others["triton"]
        measured = {"shape": (m, n, k), "ours": times, "bandwidth": bandwidth, **others}
        yield {"name": f"table_{m}x{n}x{k}", **measured}


def _calls(m: int, n: int, k: int) -> tuple[int, int]:
    """Calls of a yardstick's batch, and distinct weights: more than the card's cache holds."""
    calls = 48 if m <= 1024 else 12
    return calls, min(calls, max(2, -(-(3 * 60 << 20) // (n * k))))


def _yardsticks(m: int, n: int, k: int) -> Entry:
    """Microseconds of Triton's best configuration and of torch."""
    import cuda_triton as yardstick
    import torch  # pyright: ignore[reportMissingImports]

    calls, distinct = _calls(m, n, k)
    x = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    w = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(distinct)]
    x_scale = torch.randint(118, 136, (m, k // 32), dtype=torch.uint8, device="cuda")
    w_scale = torch.randint(118, 136, (-(-n // 32), k // 32), dtype=torch.uint8, device="cuda")
    operands = [(x, w[i % distinct], x_scale, w_scale) for i in range(calls)]
    best = (float("inf"), "none ran")
    for config in yardstick.configs(m):
        try:
            took = yardstick.time_calls(yardstick.triton_call(config, m, n, k), operands)
        except Exception as error:
            print(f"triton {config.describe()}: {str(error).splitlines()[0][:120]}")
            continue
        best = min(best, (took, config.describe()))
    x16, w16 = x.bfloat16(), [v.bfloat16() for v in w]
    bf16 = yardstick.time_calls(
        yardstick.torch_linear, [(x16, w16[i % distinct]) for i in range(calls)]
    )
    ones = [torch.ones(s, 1, device="cuda") for s in (m, n)]
    try:
        row = [(x, w[i % distinct], ones[0], ones[1].t()) for i in range(calls)]
        fp8 = yardstick.time_calls(yardstick.torch_fp8, row)
    except Exception as error:
        print(f"torch fp8: {str(error).splitlines()[0][:120]}")
        fp8 = float("nan")
    return {"triton": best, "bf16": bf16, "fp8": fp8}


def _compare_unscaled(entries: list[Entry], folder: Path) -> Iterator[Entry]:
    """Ours, then torch's matmul of the same activations by weights of their type, and the table."""
    ours: dict[tuple[int, int, int], dict[str, float]] = {}
    for entry, result in zip(entries, _time(entries, folder), strict=True):
        key = (entry["rows"][0], entry["problem"]["n"], entry["problem"]["k"])
        ours.setdefault(key, {})[entry["problem"]["lhs"]] = result.get("us", float("nan"))
        yield result
    import torch  # pyright: ignore[reportMissingImports]

    types = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    print(f"{torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}")
    print(f"| M, N, K | {' | '.join(f'{name} | torch {name}' for name in types)} |")
    print("|---" * (1 + 2 * len(types)) + "|")
    for shape, times in ours.items():
        others = {name: _torch_linear(*shape, dtype) for name, dtype in types.items()}
        cells = [f"{times.get(name, float('nan')):.1f} | {others[name]:.1f}" for name in types]
        print(f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |", flush=True)
        yield {"name": f"unscaled_table_{shape}", "ours": times, "torch": others}


def _torch_linear(m: int, n: int, k: int, dtype: Any) -> float:
    """Microseconds of torch's matmul of one type; f32 as torch does it by default, without TF32."""
    import cuda_triton as yardstick
    import torch  # pyright: ignore[reportMissingImports]

    calls, distinct = _calls(m, n, k)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    w = [torch.randn(n, k, device="cuda", dtype=dtype) for _ in range(distinct)]
    return yardstick.time_calls(
        yardstick.torch_linear, [(x, w[i % distinct]) for i in range(calls)]
    )


if __name__ == "__main__":
    sys.exit(main())
