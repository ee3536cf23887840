# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A model compiled through a spec and iree-compile is the model of ``block32 compile``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.lowering.problem import ScaledMatmul
from block32.runtime import reference
from block32.tools.iree_compile import run_iree_compile
from block32.tools.transform_spec import SPEC_FLAG
from tests.numbers import CODES, random_operands, run_function
from tests.tools.specs import GENERIC, LOCAL, apply_spec, layers, write_spec

MODEL = Path(__file__).with_name("spec_forms.mlir")
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
Array = npt.NDArray[Any]

#: The scales that the model itself holds.
X_SCALE = np.arange(120, 128, dtype=np.uint8).reshape(4, 2)
W_SCALE = np.array([[128, 119], [126, 131]], np.uint8)
OTHER_SCALE = np.array([[121, 127], [130, 118]], np.uint8)


# ---- the numbers ---------------------------------------------------------------------------


@dataclass
class Call:
    """The arguments of a function of the model, and its result in float64."""

    arguments: list[Array]
    expected: npt.NDArray[np.float64]


def product(x: CODES, xs: CODES, w: CODES, ws: CODES, block_n: int = 32) -> Array:
    kind = "e5m2" if x.shape[1] == 72 else "e4m3"
    return reference.scaled_matmul(x, xs, w, ws, rhs_block=(block_n, 32), lhs_element=kind)


def call_marked(seed: int, init: bool = False, transposed: bool = False) -> Call:
    given = random_operands(ScaledMatmul(4, 48, 64), seed=seed)
    expected = product(given.lhs, X_SCALE, given.rhs, W_SCALE)
    rhs = np.ascontiguousarray(given.rhs.T) if transposed else given.rhs
    arguments: list[Array] = [given.lhs.view(E4M3), rhs.view(E4M3)]
    if init:
        start = np.random.default_rng(seed).uniform(-1e4, 1e4, (4, 48)).astype(np.float32)
        return Call([*arguments, start], expected + start.astype(np.float64))
    return Call(arguments, expected)


def call_layers() -> Call:
    given = random_operands(ScaledMatmul(4, 48, 64), seed=4)
    first, second = (product(given.lhs, X_SCALE, given.rhs, s) for s in (W_SCALE, OTHER_SCALE))
    return Call([given.lhs.view(E4M3), given.rhs.view(E4M3)], first - second)


def call_contract_twice(m: int) -> Call:
    given = random_operands(ScaledMatmul(m, 48, 64), seed=5)
    other = random_operands(ScaledMatmul(m, 48, 64), seed=6).rhs
    first, second = (
        product(given.lhs, given.lhs_scale, w, given.rhs_scale) for w in (given.rhs, other)
    )
    return Call([*given.arrays(), other.view(E4M3)], first - second)


def call_contract_transposed() -> Call:
    problem = ScaledMatmul(3, 40, 72, lhs="f8E5M2", rhs_block=(1, 32))
    given = random_operands(problem, seed=7)
    start = np.random.default_rng(7).uniform(-1e5, 1e5, (3, 40)).astype(ml_dtypes.bfloat16)
    expected = product(given.lhs, given.lhs_scale, given.rhs, given.rhs_scale, block_n=1)
    x, _, xs, ws = given.arrays()
    w = np.ascontiguousarray(given.rhs.T).view(E4M3)
    return Call([x, w, xs, ws, start], expected + start.astype(np.float64))


def call_contract_with_itself() -> Call:
    given = random_operands(ScaledMatmul(4, 4, 64), seed=8)
    expected = product(given.lhs, given.lhs_scale, given.lhs, given.lhs_scale, block_n=1)
    return Call([given.lhs.view(E4M3), given.lhs_scale.view(E8M0)], expected)


def call_generic_swapped(m: int) -> Call:
    given = random_operands(ScaledMatmul(m, 48, 64, rhs_block=(1, 32)), seed=9)
    expected = product(given.lhs, given.lhs_scale, given.rhs, given.rhs_scale, block_n=1)
    x, w, xs, ws = given.arrays()
    return Call([x.reshape(m, 2, 32), w.reshape(48, 2, 32), xs, ws], expected)


def call_generic_split() -> Call:
    given = random_operands(ScaledMatmul(4, 64, 64), seed=10)
    expected = product(given.lhs, given.lhs_scale, given.rhs, given.rhs_scale)
    x, w, xs, ws = given.arrays()
    arguments = [x.reshape(4, 2, 32), w.reshape(2, 32, 2, 32), xs, ws]
    return Call(arguments, expected.reshape(4, 2, 32))


CALLS: dict[str, tuple[str, Callable[[], Call]]] = {
    "marked, scales by name": ("marked", lambda: call_marked(1)),
    "marked, constant scales, B as (k, n)": (
        "marked_constants",
        lambda: call_marked(2, transposed=True),
    ),
    "marked, on an init": ("marked_init", lambda: call_marked(3, init=True)),
    "two layers on one weight": ("layers", call_layers),
    "scaled_contract, dynamic M": ("contract_twice", lambda: call_contract_twice(33)),
    "scaled_contract, M = 1": ("contract_twice", lambda: call_contract_twice(1)),
    "scaled_contract, no rows": ("contract_twice", lambda: call_contract_twice(0)),
    "scaled_contract, B as (k, n), bf16, on an init": (
        "contract_transposed",
        call_contract_transposed,
    ),
    "scaled_contract, x times x": ("contract_with_itself", call_contract_with_itself),
    "generic, operands swapped, dynamic M": ("generic_swapped", lambda: call_generic_swapped(5)),
    "generic, N split": ("generic_split", call_generic_split),
}


@dataclass
class BothWays:
    """The model compiled through the pipeline and through a spec, and what both dumped."""

    compiled: bytes
    through_spec: bytes
    compiled_dump: Path
    spec_dump: Path


@pytest.fixture(scope="module", params=["cpu", "portable"])
def both_ways(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BothWays:
    target = request.param
    folder = tmp_path_factory.mktemp(target)
    dumps = [folder / "compiled", folder / "spec"]
    first, second = (f"--iree-hal-dump-executable-files-to={dump}" for dump in dumps)
    compiled = block32.compile(MODEL, target=target, flags=(*GENERIC, first))
    spec = folder / "spec.mlir"
    write_spec(MODEL, spec, f"--target={target}", *(LOCAL if target == "portable" else ()))
    return BothWays(compiled, apply_spec(MODEL, spec, *GENERIC, second), *dumps)


@pytest.mark.parametrize(("function", "call"), CALLS.values(), ids=CALLS.keys())
def test_both_ways_give_the_same_and_the_right_numbers(
    both_ways: BothWays, function: str, call: Callable[[], Call]
) -> None:
    given = call()
    got = run_function(both_ways.through_spec, function, *given.arguments)
    same = run_function(both_ways.compiled, function, *given.arguments)
    assert got.dtype == same.dtype
    assert got.tobytes() == same.tobytes()
    assert got.shape == given.expected.shape
    if got.size:
        tolerance = 2**-8 if got.dtype == ml_dtypes.bfloat16 else 2**-18
        size = np.abs(given.expected).max()
        np.testing.assert_allclose(
            got.astype(np.float64), given.expected, rtol=0, atol=tolerance * size
        )


# ---- the kernels ---------------------------------------------------------------------------


def code_by_function(folder: Path) -> dict[str, bytes]:
    """The machine code of every function in a dumped object, before it is linked.

    IREE puts each function into a section ``.text.NAME``. Addresses are zeros there, and what they
    refer to is in the relocations: code compares as code.
    """
    (path,) = folder.glob("*.o")
    content = path.read_bytes()
    assert content[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", content, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", content, 0x3A)
    entries = [struct.unpack_from("<IIQQQQ", content, table + i * entry_size) for i in range(count)]
    names = entries[names_index][4]
    code = {}
    for name_offset, _, _, _, offset, size in entries:
        begin = names + name_offset
        name = content[begin : content.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            code[name.removeprefix(".text.")] = content[offset : offset + size]
    return code


def test_the_kernels_are_the_same_code(both_ways: BothWays) -> None:
    compiled, through_spec = (
        code_by_function(folder) for folder in (both_ways.compiled_dump, both_ways.spec_dump)
    )
    kernels = [name for name in compiled if name.startswith(("gemm_", "pack_"))]
    if both_ways.compiled_dump.parent.name.startswith("cpu"):
        assert len(kernels) >= 10
        assert {n: compiled[n] for n in kernels} == {n: through_spec.get(n) for n in kernels}
        # IREE knows at different times that the rows of two results are equal, and hands one or
        # both numbers to what it writes itself: those dispatches are the same, their code is not.
        assert own_dispatches(compiled).keys() == own_dispatches(through_spec).keys()
        return
    # IREE names its own dispatches after the function that it found them in.
    own = [sorted(own_dispatches(code).values()) for code in (compiled, through_spec)]
    assert own[0] == own[1]


def own_dispatches(code: dict[str, bytes]) -> dict[str, bytes]:
    """The kernels that IREE writes itself."""
    return {name: body for name, body in code.items() if "_dispatch_" in name}


def test_a_named_cpu_gives_its_kernels_and_says_which_flag_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.mlir"
    model.write_text(layers(1))
    spec, flag = tmp_path / "spec.mlir", "--iree-llvmcpu-target-cpu=host"
    text = write_spec(model, spec, "--target=cpu", "--cpu=host")
    assert f"note: iree-compile needs {flag} with this spec" in capsys.readouterr().err
    header = text.partition("\n\n")[0]
    assert f"// Its kernels need {flag}" in header
    assert f" {flag} " in header.splitlines()[1]
    dumps = [tmp_path / "compiled", tmp_path / "spec"]
    first, second = (f"--iree-hal-dump-executable-files-to={dump}" for dump in dumps)
    block32.compile(model, target="cpu", flags=(*LOCAL, first))
    apply_spec(model, spec, *LOCAL, flag, second)
    compiled, through_spec = (code_by_function(dump) for dump in dumps)
    kernels = [name for name in compiled if name.startswith("gemm_")]
    assert kernels
    assert {n: compiled[n] for n in kernels} == {n: through_spec.get(n) for n in kernels}


def test_the_command_in_the_header_works(tmp_path: Path) -> None:
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(layers(1))
    text = write_spec(model, spec, "--target=cpu")
    command = text.splitlines()[1].removeprefix("//   ").split()
    assert command[:2] == ["iree-compile", str(model)]
    position = command.index(f"{SPEC_FLAG}=spec.mlir")
    command[position] = f"{SPEC_FLAG}={spec}"
    vmfb = run_iree_compile(command[1 : command.index("-o")])
    x = random_operands(ScaledMatmul(4, 32, 64)).lhs.view(E4M3)
    assert run_function(vmfb, "main", x).shape == (4, 32)


def test_gfx950_gets_the_same_code_object(tmp_path: Path) -> None:
    """All tiers of one matmul, in one file for the device: it is the same byte for byte."""
    pytest.importorskip("block32.lowering.gfx950.target")
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(layers(1).replace("64xf8", "512xf8").replace("x2xi8", "x16xi8"))
    text = write_spec(model, spec, "--target=gfx950")
    flags = ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx950")
    assert all(f" {flag} " in text.splitlines()[1] for flag in flags)
    objects = []
    for name in ("compiled", "spec"):
        dump = f"--iree-hal-dump-executable-files-to={tmp_path / name}"
        if name == "compiled":
            block32.compile(model, target="gfx950", flags=(*flags, dump))
        else:
            apply_spec(model, spec, *flags, dump)
        objects.append({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.hsaco")})
    assert len(objects[0]) == 1
    assert objects[0] == objects[1]
