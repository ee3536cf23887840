# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A program's own calls of composites are found by a spec, and get the kernels of a compile."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from block32.lowering.problem import Grouping, ScaledMatmul
from block32.lowering.targets import TARGETS
from block32.runtime import reference
from tests.grouped import program
from tests.numbers import run_function
from tests.tools.specs import GENERIC, apply_spec, write_spec

GROUPED = ScaledMatmul(None, 48, 64, grouping=Grouping(4, 3))
W8A16 = ScaledMatmul(None, 48, 64, lhs="f32", lhs_scaled=False)


def test_a_grouped_matmul(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "toy", ("tests.lowering.toy_target", "ToyTarget"))
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(program(GROUPED, calls=2))
    text = write_spec(model, spec, "--target=toy")
    assert "Block-scaled matmuls: 2 (distinct: 1)." in text
    assert text.count("hal.executable.source private") == 1
    rng = np.random.default_rng(0)
    x, w = (reference.encode(rng.standard_normal(s)) for s in ((9, 64), (4, 48, 64)))
    x_scale, w_scale = (rng.integers(120, 130, s, np.uint8) for s in ((9, 2), (4, 2, 2)))
    groups = [np.array([1, 3, 3, 8], np.int32), np.array([2, 0, -1], np.int32)]
    init = rng.standard_normal((9, 48)).astype(np.float32)
    e4m3, e8m0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
    arguments = [x.view(e4m3), w.view(e4m3), x_scale.view(e8m0), w_scale.view(e8m0)]
    got = run_function(apply_spec(model, spec, *GENERIC), "main", *arguments, *groups, init)
    want = reference.grouped_matmul(x, x_scale, w, w_scale, groups[0], groups[1], init)
    comparison = reference.compare(got, want, "f32")
    assert comparison.ok, comparison


def test_a_matmul_without_scales_of_x(tmp_path: Path) -> None:
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(program(W8A16))
    write_spec(model, spec, "--target=cpu")
    applied = apply_spec(model, spec, *GENERIC, "--compile-to=flow").decode()
    main = applied[applied.index("util.func public @main") :]
    assert "@block32_kernels_0_Mx48x64_f32_e4m3_32x32_f32::@" in main
    assert "util.call" not in main


def test_a_composite_without_a_kernel_becomes_its_meaning(tmp_path: Path) -> None:
    model, spec = tmp_path / "model.mlir", tmp_path / "spec.mlir"
    model.write_text(program(GROUPED))
    text = write_spec(model, spec, "--target=portable", *GENERIC)
    assert "hal.executable.source" not in text
    applied = apply_spec(model, spec, *GENERIC, "--compile-to=preprocessing").decode()
    assert applied.count("block32.replaced = ") == 1
