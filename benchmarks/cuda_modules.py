# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The modules that ``cuda.py`` runs: which kernels, and compiling them into a folder.

Needs the compiler and no card; ``cuda.py`` needs the card and no compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iree.compiler import ir

from block32.dialects.kernel import KernelTier
from block32.lowering.host import (
    StandaloneModule,
    build_standalone_module,
    operand_types,
    result_type,
)
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.portable.quantize import quantize
from block32.lowering.problem import Epilogue, Grouping, ScaledMatmul
from block32.lowering.target import DeviceFacts
from block32.lowering.targets import target_named
from block32.tools.iree_compile import run_iree_compile

#: (M, N, K) of the table in docs/, M being what is timed.
TIMED = (
    (1, 4096, 4096),
    (8, 4096, 4096),
    (1, 16384, 8192),
    (1, 7168, 16384),
    (32, 7168, 2048),
    (256, 4096, 4096),
    (4096, 4096, 4096),
)

#: (N, K) of models that people run.
MODEL_SHAPES = (
    (1152, 5120),
    (1792, 5120),
    (2304, 5120),
    (4096, 1280),
    (5120, 576),
    (5120, 1152),
    (5120, 2048),
    (5120, 4096),
    (8192, 1280),
    (16384, 1280),
)

#: M that every shape of ``MODEL_SHAPES`` is checked at.
TOKENS = (1, 3, 7, 8, 16, 31, 32, 33, 63, 129, 192, 255, 1023, 1024)

#: (M, N, K) with edges in every direction.
RAGGED = (
    (3, 2053, 1280),
    (63, 8193, 1280),
    (129, 4097, 576),
    (255, 16385, 1152),
    (33, 130, 96),
    (50, 128, 1040),
    (7, 96, 77),
    (16, 73448, 2560),
)


@dataclass(frozen=True)
class Module:
    """One module to compile.

    Attributes:
        name: Its file's stem.
        kind: ``check``, ``dynamic``, ``quantized``, ``grouped``, ``timed``, ``unscaled`` or
            ``tune``.
        problem: The matmul, M dynamic.
        target: A name of ``lowering.targets``.
        rows: The M that it is run with.
        tiers: Its tiers; what the target selects when empty.
        batches: Calls of its two timing functions; none where it is checked.
        groups: For ``grouped``, tokens and expert of each group.
    """

    name: str
    kind: str
    problem: ScaledMatmul
    target: str
    rows: tuple[int, ...]
    tiers: tuple[KernelTier, ...] = ()
    batches: tuple[int, int] | None = None
    groups: tuple[tuple[int, int], ...] = ()


def all_modules() -> list[Module]:
    """Every module, by kind."""
    return [
        *_timed(),
        *_unscaled(),
        *_checked(),
        *_quantized(),
        *_grouped(),
        *_tuned(),
    ]


def _checked() -> Iterator[Module]:
    for target in ("sm_90a", "sm_90a-f32"):
        for n, k in MODEL_SHAPES if target == "sm_90a" else MODEL_SHAPES[4:6]:
            yield _check(ScaledMatmul(None, n, k), target, TOKENS)
    for m, n, k in RAGGED:
        yield _check(ScaledMatmul(None, n, k), "sm_90a", (1, m))
    for n in (1, 2, 12, 16, 24, 31, 32, 33, 48):
        yield _check(ScaledMatmul(None, n, 128 if n % 12 else 640), "sm_90a", (1, 5, 40, 130))
    yield from _checked_types()
    yield from _checked_splits()


def _checked_types() -> Iterator[Module]:
    tokens = (1, 8, 33, 192)
    problem = ScaledMatmul(None, 1056, 1152)
    for changes in (
        {"rhs_block": (1, 32)},
        {"result": "bf16"},
        {"result": "f16"},
        {"lhs": "f8E5M2", "rhs_block": (1, 32)},
        {"rhs": "f8E5M2"},
        {"rhs": "f4E2M1FN"},
        {"rhs": "f4E2M1FN", "rhs_block": (1, 32), "result": "bf16"},
        {"lhs": "bf16", "lhs_scaled": False},
        {"lhs": "f16", "lhs_scaled": False, "rhs": "f4E2M1FN"},
        {"lhs": "f32", "lhs_scaled": False},
        {"lhs": "f32", "lhs_scaled": False, "rhs_block": (1, 32), "result": "bf16"},
        {"lhs": "f32", "lhs_scaled": False, "rhs": "f4E2M1FN"},
        {
            "epilogue": Epilogue(
                row_scale=True, scale=True, bias="bf16", residual="f32", activation="silu"
            )
        },
    ):
        yield _check(dataclasses.replace(problem, **changes), "sm_90a", tokens)
    yield _check(problem, "sm_89", tokens)
    f32 = dataclasses.replace(problem, lhs="f32", lhs_scaled=False)
    yield _check(f32, "sm_89", tokens)
    for m, n, k in RAGGED:
        yield _check(dataclasses.replace(f32, n=n, k=k), "sm_90a", (1, m))


def _checked_splits() -> Iterator[Module]:
    """Each form split, reduced in the launch and in a second one; small ones for slow checkers."""
    forms = (
        KernelTier("stream", tile=(8, 32, 128), warps=4, stages=4, splits=3),
        KernelTier("tiled", tile=(64, 64, 64), warps=4, stages=4, splits=3),
        KernelTier("tiled", tile=(128, 128, 128), warps=8, stages=4, splits=3, mma=(64, 128, 32)),
    )
    fp8 = ScaledMatmul(None, 5120, 5760)
    small = ScaledMatmul(None, 320, 1152)
    f32 = ScaledMatmul(None, 1056, 2304, lhs="f32", lhs_scaled=False)
    for prefix, problem in (("split", fp8), ("small_split", small), ("split_f32", f32)):
        for index, tier in enumerate(forms if problem.lhs_scaled else forms[:2]):
            for reduce in ("in_launch", "second_launch"):
                yield Module(
                    f"{prefix}_{index}_{reduce}",
                    "check",
                    problem,
                    "sm_90a",
                    (4, 19, 200),
                    (dataclasses.replace(tier, reduce=reduce),),
                )


def _quantized() -> Iterator[Module]:
    """X quantised with the matmul, and before it as IREE compiles that for the card."""
    for n, k in ((320, 1152), (4096, 1280), (4096, 4096), (96, 77)):
        for element in ("bf16", "f16", "f32"):
            problem = ScaledMatmul(None, n, k, lhs=element, lhs_scaled=False, lhs_quantize="rceil")
            rows = (1, 3, 8, 9, 33, 130)
            for kind in ("dynamic", "quantized"):
                yield Module(f"{kind}_{n}x{k}_{element}", kind, problem, "sm_90a", rows)
    problem = ScaledMatmul(None, 320, 1152, lhs="bf16", lhs_scaled=False, lhs_quantize="rceil")
    for kind in ("dynamic", "quantized"):
        yield Module(f"{kind}_sm_89_320x1152", kind, problem, "sm_89", (1, 8, 33))


#: (experts, N, K), and (tokens, expert) of each group; -1 is no expert.
GROUPED = (
    ((4, 128, 64), ((3, 2), (0, 0), (5, 3), (2, 1))),
    ((4, 70, 40), ((7, 1), (0, 0), (20, 3))),
    ((4, 70, 40), ((16, 0), (24, -1))),
    ((16, 320, 1152), ((1, 9), (3, 0), (2, 15), (1, 9), (2, 3), (3, 2), (1, 9), (2, 1))),
    ((8, 1856, 2688), ((1, 0), (1, 3), (2, 1), (0, 4), (1, 5), (1, 2))),
    ((4, 1056, 1152), ((300, 1), (7, 3), (0, 0), (129, -1), (520, 0))),
)


def _grouped() -> Iterator[Module]:
    """Groups of rows with each activation; rows of no group come before and behind them."""
    activations: tuple[tuple[str, dict[str, Any]], ...] = (
        ("w8a8", {}),
        ("w8a16", {"lhs": "bf16", "lhs_scaled": False}),
        ("f32", {"lhs": "f32", "lhs_scaled": False}),
        ("dynamic", {"lhs": "bf16", "lhs_scaled": False, "lhs_quantize": "rceil"}),
    )
    for number, ((experts, n, k), groups) in enumerate(GROUPED):
        for name, changes in activations:
            grouping = Grouping(experts, len(groups))
            problem = ScaledMatmul(None, n, k, grouping=grouping, **changes)
            yield Module(
                f"grouped_{number}_{name}", "grouped", problem, "sm_90a", (), groups=groups
            )
    problem = ScaledMatmul(None, 128, 64, grouping=Grouping(4, 4))
    yield Module("grouped_sm_89", "grouped", problem, "sm_89", (), groups=GROUPED[0][1])


def _check(problem: ScaledMatmul, target: str, rows: tuple[int, ...]) -> Module:
    suffix = "_epilogue" if problem.epilogue.operand_names() else ""
    return Module(f"check_{target}_{problem.describe()}{suffix}", "check", problem, target, rows)


def _batches(m: int) -> tuple[int, int]:
    """Calls of the two functions whose difference is timed."""
    return (2, 14) if m > 1024 else (8, 48)


def _timed() -> Iterator[Module]:
    for target in ("sm_90a", "sm_90a-f32"):
        for n, k in sorted({(n, k) for _, n, k in TIMED}):
            problem = ScaledMatmul(None, n, k, result="bf16")
            for m in (m for m, *shape in TIMED if shape == [n, k]):
                name = f"timed_{target}_{m}x{n}x{k}"
                yield Module(name, "timed", problem, target, (m,), batches=_batches(m))


def _unscaled() -> Iterator[Module]:
    """Activations that are not quantised, of each type and beside torch's matmul in that type."""
    for m, n, k in TIMED:
        for element in ("bf16", "f16", "f32"):
            problem = ScaledMatmul(None, n, k, lhs=element, lhs_scaled=False, result=element)
            name = f"unscaled_{element}_{m}x{n}x{k}"
            yield Module(name, "unscaled", problem, "sm_90a", (m,), batches=_batches(m))


def _tuned() -> Iterator[Module]:
    for m, n, k in TIMED:
        problem = ScaledMatmul(None, n, k, result="bf16")
        for index, tier in enumerate(_candidates(m)):
            reason = target_named("sm_90a").verify(problem, tier, DeviceFacts())
            if reason is None:
                name = f"tune_{m}x{n}x{k}_{index}"
                yield Module(name, "tune", problem, "sm_90a", (m,), (tier,), _batches(m))


def _candidates(m: int) -> Iterator[KernelTier]:
    if m <= 32:
        rows = max(8, -(-m // 8) * 8)
        for columns, block_k, warps, stages, splits in (
            (32, 128, 4, 4, 1),
            (32, 128, 8, 4, 1),
            (32, 128, 2, 4, 1),
            (32, 256, 4, 3, 1),
            (16, 128, 4, 4, 1),
            (16, 256, 4, 3, 1),
            (16, 256, 4, 4, 1),
            (32, 128, 4, 4, 2),
            (32, 128, 2, 6, 1),
            (16, 128, 8, 4, 1),
            (16, 128, 2, 6, 1),
            (16, 128, 2, 8, 1),
            (64, 128, 2, 4, 1),
        ):
            tile = (rows, columns, block_k)
            yield KernelTier("stream", tile=tile, warps=warps, stages=stages, splits=splits)
        if m > 8:
            yield from _few_row_tiles(rows)
            yield from _few_row_streams(rows)
        return
    for block_m, block_n, stages, splits in (
        (128, 128, 6, 1),
        (128, 128, 6, 2),
        (64, 128, 4, 1),
        (64, 128, 4, 2),
        (128, 64, 4, 1),
        (128, 64, 4, 2),
        (64, 64, 4, 1),
        (256, 64, 4, 1),
        (128, 128, 4, 1),
        (128, 64, 6, 1),
        (128, 96, 4, 1),
        (256, 128, 4, 1),
        (64, 96, 4, 1),
    ):
        if m > 1024 and splits > 1:
            continue
        tile, mma = (block_m, block_n, 128), (64, block_n, 32)
        yield KernelTier(
            "tiled",
            tile=tile,
            mma=mma,
            warps=block_m // 16,
            stages=stages,
            splits=splits,
            order="m",
        )


def _few_row_tiles(rows: int) -> Iterator[KernelTier]:
    """Tiles of all rows, whose fragments the warps share."""
    for columns, block_k, warps, stages in (
        (32, 64, 4, 6),
        (32, 128, 4, 4),
        (32, 128, 4, 6),
        (32, 128, 2, 6),
        (64, 128, 4, 4),
    ):
        tile = (rows, columns, block_k)
        yield KernelTier("tiled", tile=tile, warps=warps, stages=stages, order="m")


def _few_row_streams(rows: int) -> Iterator[KernelTier]:
    """Many warps, which share out the conversion of operands, and few stages of each."""
    for columns, block_k, warps, stages in (
        (64, 128, 8, 2),
        (64, 128, 4, 4),
        (64, 128, 4, 3),
        (64, 256, 4, 2),
        (32, 128, 4, 3),
        (32, 128, 4, 2),
        (32, 128, 8, 2),
        (32, 128, 8, 3),
        (32, 256, 4, 2),
        (16, 128, 4, 3),
        (16, 128, 8, 2),
    ):
        tile = (rows, columns, block_k)
        yield KernelTier("stream", tile=tile, warps=warps, stages=stages)


def compile_all(folder: Path, only: str = "") -> None:
    """Compile the modules whose name contains ``only`` into ``folder``, with a manifest.

    Modules whose text has not changed since they were compiled are left as they are, and the
    manifest keeps what it had of others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    known = json.loads(manifest.read_text()) if manifest.exists() else []
    entries = {entry["name"]: entry for entry in known}
    modules = [module for module in all_modules() if only in module.name]
    for number, module in enumerate(modules):
        print(f"[{number + 1}/{len(modules)}] {module.name}", file=sys.stderr)
        entries[module.name] = _compile(module, folder)
        partial = manifest.with_suffix(".part")
        partial.write_text(json.dumps(list(entries.values()), indent=1))
        partial.replace(manifest)


def _compile(module: Module, folder: Path) -> dict[str, object]:
    target = target_named(module.target)
    is_quantized = module.kind == "quantized"
    problem = module.problem.quantized() if is_quantized else module.problem
    tiers, reason = module.tiers, "given"
    if not tiers:
        selection = target.select(problem, DeviceFacts())
        assert selection.config is not None, selection.reason
        tiers, reason = selection.config.tiers, selection.reason
    spec = KernelSpec(problem, target, tiers)
    if is_quantized:
        text = _quantized_text(spec, module.problem.lhs)
    else:
        text = _module_text(spec, module.batches)
    digest = hashlib.sha256(text.encode()).hexdigest()
    output, stamp = folder / f"{module.name}.vmfb", folder / f"{module.name}.sha256"
    if not (output.exists() and stamp.exists() and stamp.read_text() == digest):
        output.write_bytes(run_iree_compile(["-", *target.compile_flags()], stdin=text.encode()))
        stamp.write_text(digest)
    return {
        "name": module.name,
        "kind": module.kind,
        "file": output.name,
        "target": module.target,
        "problem": dataclasses.asdict(module.problem),
        "rows": module.rows,
        "batches": module.batches,
        "groups": module.groups,
        "tiers": [_tier_fields(tier) for tier in tiers],
        "reason": reason,
    }


def _tier_fields(tier: KernelTier) -> dict[str, object]:
    """A tier's fields that are not at their default."""
    return {
        field.name: getattr(tier, field.name)
        for field in dataclasses.fields(tier)
        if field.name == "form" or getattr(tier, field.name) != field.default
    }


def _module_text(spec: KernelSpec, batches: tuple[int, int] | None) -> str:
    """``main``, and for timing ``short`` and ``long``: many calls, each with a weight of its own.

    Both take the operands of the longer one, so that what a call costs on the host cancels out.
    """
    with ir.Context(), ir.Location.unknown():
        if batches is None:
            return str(build_standalone_module(spec))
        standalone = StandaloneModule(spec)
        _add_batch(standalone, spec.problem, "main", 1, 1)
        for name, calls in zip(("short", "long"), batches, strict=True):
            _add_batch(standalone, spec.problem, name, calls, max(batches))
        return str(standalone.finish())


def _add_batch(
    standalone: StandaloneModule, problem: ScaledMatmul, name: str, calls: int, weights: int
) -> None:
    """``name(x, x_scale, w_0, .., w_scale_0, ..) -> y`` of the last call.

    Where calls quantise x, each has its own (``x_0, .., w_0, .., w_scale_0, ..``), or it would be
    quantised once for all. The other results are kept alive to the end, but not given back: handing
    48 arrays to Python takes longer than computing them.
    """
    types, result = operand_types(problem), result_type(problem)
    xs = weights if problem.lhs_quantize else 1
    names = ["lhs"] * xs + [operand for operand in ("lhs_scale",) if operand in types]
    names += ["rhs"] * weights + ["rhs_scale"] * weights
    block = standalone.add_function(name, [types[operand] for operand in names], [result])
    first = {operand: names.index(operand) for operand in types}
    with ir.InsertionPoint(block):
        outputs = []
        for number in range(calls):
            turns = {"lhs": number % xs, "lhs_scale": 0}
            operands = [block.arguments[first[o] + turns.get(o, number)] for o in types]
            outputs.append(standalone.call(operands))
        for y in outputs:
            ir.Operation.create("util.optimization_barrier", results=[result], operands=[y])
        ir.Operation.create("func.return", operands=[outputs[-1]])


def _quantized_text(spec: KernelSpec, element: str) -> str:
    """``main(x, w, w_scale) -> y, codes, scales``, and ``matmul`` of codes and scales."""
    with ir.Context(), ir.Location.unknown():
        standalone = StandaloneModule(spec)
        problem = spec.problem
        types, result = operand_types(problem), result_type(problem)
        rows = ir.ShapedType.get_dynamic_size()
        x_type = ir.RankedTensorType.get([rows, problem.k], ir.Type.parse(element))
        quantized = [types["lhs"], types["lhs_scale"]]
        block = standalone.add_function(
            "main", [x_type, types["rhs"], types["rhs_scale"]], [result, *quantized]
        )
        with ir.InsertionPoint(block):
            x, w, w_scale = block.arguments
            codes, scales = quantize(x, "rceil", problem.lhs)
            y = standalone.call([codes, w, scales, w_scale])
            ir.Operation.create("func.return", operands=[y, codes, scales])
        block = standalone.add_function("matmul", list(types.values()), [result])
        with ir.InsertionPoint(block):
            y = standalone.call(list(block.arguments))
            ir.Operation.create("func.return", operands=[y])
        return str(standalone.finish())
