# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Constants that hold scales: every way that MLIR stores them, and exact E8M0 bytes or none."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from iree.compiler import ir

from block32.passes import constants

VALUES = [[2.0**-20, 0.5], [1.0, 2.0**15]]


def constant(text: str, resources: str = "") -> ir.Attribute:
    module = ir.Module.parse(
        f"func.func @f() {{ %0 = arith.constant {text} return }}\n{resources}", ir.Context()
    )
    return (
        module.body.operations[0].regions[0].blocks[0].operations[0].operation.attributes["value"]
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
@pytest.mark.parametrize("form", ["listed", "hex", "resource"])
def test_values_come_back_whatever_the_storage(name: str, dtype: type, form: str) -> None:
    wanted = np.array(VALUES).astype(dtype)
    content = wanted.tobytes().hex()
    listed = str([[float(value) for value in row] for row in wanted.tolist()])
    text = {"listed": listed, "hex": f'"0x{content}"', "resource": "r"}[form]
    kind = "dense_resource" if form == "resource" else "dense"
    resources = f'{{-# dialect_resources: {{builtin: {{r: "0x04000000{content}"}}}} #-}}'
    attribute = constant(f"{kind}<{text}> : tensor<2x2x{name}>", resources)
    found = constants.read_floats(attribute)
    assert found is not None
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


def test_a_splat_fills_its_shape() -> None:
    found = constants.read_floats(constant("dense<0.25> : tensor<3x2xf32>"))
    assert found is not None
    assert found.tolist() == [[0.25] * 2] * 3


def test_other_types_are_not_read() -> None:
    assert constants.read_floats(constant("dense<1> : tensor<2x2xi8>")) is None


def test_every_scale_byte_has_its_value() -> None:
    """The f32 value of each byte, from 2^-127, which is subnormal, to 2^127, and NaN."""
    codes = np.arange(256)
    values = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
    found = constants.scale_bytes(values)
    assert found is not None
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("value", [0.0123, 3.0, 0.0, -1.0, np.inf, 2.0**-128, 1.0 + 2.0**-23])
def test_what_is_no_power_of_two_has_no_byte(value: float) -> None:
    values = np.array([[1.0, value]], np.float32)
    assert constants.scale_bytes(values) is None
    assert constants.first_other(values).endswith(" at [0, 1]")
