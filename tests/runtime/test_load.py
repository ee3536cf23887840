# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loading and calling: values pass by their bytes, and whatever does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iree.runtime
import ml_dtypes
import numpy as np
import pytest

import block32
from block32.runtime import reference
from block32.runtime.errors import CallError, LoadError, VmfbError
from block32.runtime.load import Module, load
from tests.modules import CPU, GFX950, HOST, ONE, PARAMETERS, compiled, with_hal_version

CODES = np.random.default_rng(1).integers(0, 0x7F, (4, 64), np.uint8)
SCALES = np.array([[0, 254], [127, 130], [1, 255], [60, 200]], np.uint8)


@pytest.fixture(scope="module")
def module() -> Module:
    return load(compiled(), "local-sync")


def test_lists_functions_with_their_types(module: Module) -> None:
    assert list(module) == ["main", "scale", "twice"]
    assert len(module) == 3
    assert "main" in module
    assert "__init" not in module
    assert str(module["scale"].signature) == (
        "scale(tensor<?x4xf32>, i32, f32) -> (tensor<?x4xf32>, i32)"
    )
    assert "main(tensor<4x64xf8E4M3FN>" in repr(module)


@pytest.mark.parametrize("view", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn])
def test_passes_8_bit_floats_by_their_bytes(module: Module, view: Any) -> None:
    y, scales = module["main"](CODES.view(view), SCALES)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, reference.decode(CODES))
    assert scales.dtype == ml_dtypes.float8_e8m0fnu
    np.testing.assert_array_equal(scales.view(np.uint8), SCALES)


def test_passes_bf16_dynamic_shapes_and_strided_arrays(module: Module) -> None:
    x = np.arange(24, dtype=np.float32).reshape(8, 3).astype(ml_dtypes.bfloat16).T
    y = module["twice"](x, np.zeros(8, np.uint8))
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), 2 * x.astype(np.float32))
    assert module["twice"](x[:0], np.zeros(8, np.int8)).shape == (0, 8)


def test_passes_scalars(module: Module) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y, n = module["scale"](x, -7, 1.5)
    np.testing.assert_array_equal(y, 1.5 * x)
    assert n == -6
    assert module["scale"](x, 0xFFFFFFFF, 1)[1] == 0  # signless: the bits of -1


def test_functions_without_results_and_arrays_of_rank_0() -> None:
    source = b"""
    func.func @nothing(%x: tensor<2xf32>) { return }
    func.func @double(%x: tensor<f32>) -> tensor<f32> {
      %y = arith.addf %x, %x : tensor<f32>
      return %y : tensor<f32>
    }
    """
    module = load(compiled(source))
    assert module["nothing"](X[0, :2]) is None
    assert module["double"](np.float32(3)) == 6


def test_the_package_offers_load() -> None:
    assert block32.load is load


def test_a_bound_call_runs_again(module: Module) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    call = module["scale"].bind(x, 0, 2.0)
    for _ in range(3):
        np.testing.assert_array_equal(call.run().fetch()[0], 2 * x)


X = np.zeros((2, 4), np.float32)
BAD_ARGUMENTS = [
    ("main", (CODES,), "main: expected 2 arguments but got 1"),
    ("main", (CODES, SCALES, SCALES), "expected 2 arguments but got 3"),
    ("main", (CODES[:2], SCALES), r"argument 0: expected tensor<4x64xf8E4M3FN> but got uint8 of"),
    ("main", (CODES.ravel(), SCALES), r"argument 0: .* of shape \(256,\)"),
    ("main", (CODES.astype(np.float32), SCALES), "argument 0: .* but got float32"),
    ("main", (CODES.view(ml_dtypes.float8_e5m2), SCALES), "argument 0: .* but got float8_e5m2"),
    ("main", (CODES, SCALES.astype(np.int32)), "argument 1: .* but got int32"),
    ("scale", (X.astype(np.float64), 1, 1.0), "argument 0: .* but got float64"),
    ("scale", (X[:, :3], 1, 1.0), r"argument 0: .* of shape \(2, 3\)"),
    ("scale", (X, 1.5, 1.0), "argument 1: expected a number of type i32 but got float64"),
    ("scale", (X, 1 << 32, 1.0), "argument 1: 4294967296 does not fit into i32"),
    ("scale", (X, "one", 1.0), "argument 1: expected a number of type i32 but got 'one'"),
    ("scale", (X, 1, X), "argument 2: expected a number of type f32 but got float32 of shape"),
    ("scale", ("x", 1, 1.0), "argument 0: expected .* but got 'x'|array"),
    ("scale", (X.astype(">f4"), 1, 1.0), "argument 0: expected .* but got"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD_ARGUMENTS)
def test_refuses_arguments_that_do_not_fit(
    module: Module, function: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(CallError, match=message):
        module[function](*arguments)


def test_refuses_an_unknown_function(module: Module) -> None:
    with pytest.raises(CallError, match="no function 'man'; expected one of: main, scale, twice"):
        module["man"]


def test_refuses_a_function_that_takes_fences() -> None:
    flags = (*HOST, "--iree-execution-model=async-external")
    with pytest.raises(CallError, match="the function takes fences; compile it without"):
        load(compiled(ONE, flags))["only"](np.zeros(4, np.float32))


def test_refuses_a_type_that_python_cannot_pass() -> None:
    source = b"util.func public @f(%x: !hal.buffer) -> !hal.buffer { util.return %x : !hal.buffer }"
    with pytest.raises(CallError, match=r"type !hal\.buffer cannot be passed"):
        load(compiled(source))["f"](1)


def test_refuses_an_unknown_or_absent_device() -> None:
    with pytest.raises(LoadError, match=r"unknown device 'gpu'; expected one of: .*local-task"):
        load(compiled(ONE), "gpu")
    with pytest.raises(LoadError, match="device 'local-task://9' is not available: device paths"):
        load(compiled(ONE), "local-task://9")


@pytest.mark.parametrize("hal", [6, 8])
def test_refuses_another_version_with_both_versions_and_the_cure(hal: int) -> None:
    vmfb = with_hal_version(compiled(ONE), hal)
    with pytest.raises(LoadError) as caught:
        load(vmfb)
    assert f"compiled for hal version {hal}" in caught.value.message
    assert "the runtime is IREE 3.13" in caught.value.message
    assert "iree-base-compiler==3.13" in caught.value.notes[0]


def test_refuses_a_module_for_a_gpu_on_the_cpu() -> None:
    with pytest.raises(LoadError) as caught:
        load(compiled(ONE, GFX950))
    assert "needs gfx950 (AMD MI350), --device=hip, but the device is" in caught.value.message
    assert "block32 compile --target=cpu" in caught.value.notes[0]


def test_refuses_code_for_features_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    # The runtime would load it, and the process would end with SIGILL at the first call.
    vmfb = compiled(ONE, (*CPU, "--iree-llvmcpu-target-cpu=x86-64-v3"))
    features = {"avx2": False, "fma": True}
    monkeypatch.setattr("block32.runtime.load.cpu_features", lambda: features)
    monkeypatch.setattr("block32.runtime.load.architecture", lambda: "x86_64")
    with pytest.raises(LoadError, match="needs the CPU features avx2, which this CPU lacks"):
        load(vmfb)


def test_refuses_code_for_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("block32.runtime.load.architecture", lambda: "riscv_64")
    with pytest.raises(LoadError, match="needs an x86_64 CPU; this one is riscv_64"):
        load(compiled(ONE, (*CPU, "--iree-llvmcpu-target-cpu=generic")))


@pytest.mark.parametrize("size", [0, 3, 3000, -50])
def test_refuses_empty_and_truncated_files(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE)[:size])
    with pytest.raises(VmfbError) as caught:
        load(path)
    assert caught.value.render().startswith(f"{path}: error: ")
    assert "\n" not in caught.value.message


def test_external_parameters(tmp_path: Path) -> None:
    vmfb, path = compiled(PARAMETERS), tmp_path / "w.irpa"
    w = np.arange(4, dtype=np.float32)
    iree.runtime.save_archive_file({"w": w}, path)
    module = load(vmfb, parameters={"model": path})
    np.testing.assert_array_equal(module["main"](w), 2 * w)
    with pytest.raises(LoadError, match="parameters are in files of their own, and none is given"):
        load(vmfb)
    with pytest.raises(LoadError, match=r"cannot start the module: no provider .* 'model'"):
        load(vmfb, parameters={"other": path})
    with pytest.raises(LoadError, match="cannot read the parameters"):
        load(vmfb, parameters={"model": tmp_path / "missing.irpa"})
    with pytest.raises(LoadError, match="cannot read the parameters"):
        load(vmfb, parameters={"model": Path(__file__)})
    (tmp_path / "empty.irpa").touch()
    with pytest.raises(LoadError, match="cannot read the parameters: the file is empty"):
        load(vmfb, parameters={"model": tmp_path / "empty.irpa"})
    with pytest.raises(LoadError, match="expected a file"):
        load(vmfb, parameters={"model": tmp_path})
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(LoadError, match="cannot read the parameters: file segment out of range"):
        load(vmfb, parameters={"model": path})
