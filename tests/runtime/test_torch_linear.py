# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.torch``: layers in plain PyTorch, and exported and compiled, against float64."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import block32
from block32.passes.base import Remark
from block32.runtime import reference

torch = pytest.importorskip("torch", reason="needs the extra torch")
pytest.importorskip("iree.turbine", reason="needs the extra torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from block32.torch import MXLinear, convert_linear, quantize_mxfp8  # noqa: E402

RULES = ("rceil", "floor", "ceil", "even")
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def array(tensor: Any) -> npt.NDArray[Any]:
    """A tensor in NumPy; bf16 as ml_dtypes, float8 as bytes."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def expected(layer: MXLinear, x: Any) -> npt.NDArray[np.float64]:
    """What a layer means, in float64."""
    rows = array(x).reshape(-1, layer.in_features)
    codes, scales = rows, None
    if layer.activation == "mxfp8":
        codes, scales = reference.quantize(rows, layer.rule)  # type: ignore[arg-type]
    y = reference.scaled_matmul(
        codes, scales, array(layer.weight), array(layer.weight_scale), rhs_block=layer.block
    )
    y = y if layer.bias is None else y + array(layer.bias).astype(np.float64)
    return y.reshape(*x.shape[:-1], layer.out_features)


def random_linear(n: int, k: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    """A layer whose blocks have scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias)
    spread = torch.exp2(torch.randint(-6, 6, (n, k), generator=generator).float() / 2)
    linear.weight.data = torch.randn(n, k, generator=generator) * spread
    if bias:
        linear.bias.data = torch.randn(n, generator=generator)
    return linear.eval()


def random_rows(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("rule", RULES)
def test_the_operator_gives_the_bytes_of_the_reference(rule: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 72)).astype(np.float32)
    x *= np.exp2(rng.integers(-140, 120, (64, 1))).astype(np.float32)
    amax = [256, 448, 449, 480, 496, 512, 633, 634, 897, 0, 1e-30, 400, 1e-38, 2.0**-149]
    x[: len(amax), :32] = 0.0
    x[: len(amax), 5] = amax
    x[20, 3], x[21, 4], x[22, 5] = np.inf, -np.inf, np.nan
    codes, scales = quantize_mxfp8(torch.from_numpy(x), rule)
    wanted_codes, wanted_scales = reference.quantize(x, rule)  # type: ignore[arg-type]
    np.testing.assert_array_equal(array(scales), wanted_scales)
    np.testing.assert_array_equal(array(codes) & 0x7F, wanted_codes & 0x7F)
    is_nan = (wanted_codes & 0x7F) == 0x7F
    np.testing.assert_array_equal(array(codes)[~is_nan], wanted_codes[~is_nan])


@pytest.mark.parametrize("block", [(32, 32), (1, 32)])
@pytest.mark.parametrize("activation", ["none", "mxfp8"])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_forward_in_plain_pytorch(block: Any, activation: str, dtype: Any) -> None:
    """Sizes that are no multiples of the block; any number of dimensions."""
    linear = random_linear(40, 72)
    layer = MXLinear.from_linear(linear, block=block, activation=activation)
    codes, scales = reference.quantize_weight(array(linear.weight), block)
    np.testing.assert_array_equal(array(layer.weight), codes)
    np.testing.assert_array_equal(array(layer.weight_scale), scales)
    x = random_rows(2, 3, 72, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 40)
    comparison = reference.compare(array(y), expected(layer, x), KINDS[dtype])  # type: ignore[arg-type]
    assert comparison.relative_frobenius < 5e-3, comparison


class Model(nn.Module):
    """Two layers with an activation between them, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = random_linear(96, 64, seed=1)
        self.again = self.up
        self.down = random_linear(64, 96, bias=False, seed=2)

    def forward(self, x: Any) -> Any:
        return self.down(functional.gelu(self.again(self.down(functional.relu(self.up(x))))))


def compile_exported(module: nn.Module, x: Any, folder: Path) -> tuple[Any, list[Remark]]:
    """Export with a dynamic batch and parameters in a file; the function and the remarks."""
    from iree.turbine import aot

    aot.externalize_module_parameters(module)
    aot.save_module_parameters(folder / "m.irpa", module)
    batch = torch.export.Dim("batch", min=2, max=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = aot.export(module, args=(x,), dynamic_shapes={"x": {0: batch}})
    exported.save_mlir(str(folder / "m.mlir"))
    remarks: list[Remark] = []
    vmfb = block32.compile(folder / "m.mlir", target="cpu", on_remark=remarks.append)
    return block32.load(vmfb, parameters={"model": folder / "m.irpa"})["main"], remarks


@pytest.mark.parametrize("activation", ["none", "mxfp8"])
def test_a_converted_model_runs_on_kernels(activation: str, tmp_path: Path) -> None:
    """Every layer has one, for any batch; the numbers are those of PyTorch."""
    model = Model().eval()
    conversion = convert_linear(model, activation=activation)
    assert [layer.name for layer in conversion.layers] == ["up", "down"]
    assert model.again is model.up
    function, remarks = compile_exported(model, random_rows(3, 64), tmp_path)
    assert [r.severity for r in remarks] == ["remark"] * 4, remarks
    lhs = "e4m3" if activation == "mxfp8" else "f32"
    assert all(f"_{lhs}_e4m3_32x32_f32" in r.message for r in remarks), remarks
    assert all(": cpu " in r.message for r in remarks), remarks
    for batch in (1, 5, 40):
        x = random_rows(batch, 64)
        y = array(model(x)).astype(np.float64)
        got = np.array(function(array(x))).astype(np.float64)
        # An activation that PyTorch rounds up may be rounded down by a sum of another order.
        bound = 1e-5 if activation == "none" else 2e-2
        assert np.linalg.norm(got - y) <= bound * np.linalg.norm(y)


@pytest.mark.parametrize("activation", ["none", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_16_bit_activations_of_several_dimensions(
    activation: str, dtype: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(random_linear(40, 72)).to(dtype).eval()
    convert_linear(model, activation=activation, block=(1, 32))
    layer: Any = model[0]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x)

    x = random_rows(3, 2, 72, dtype=dtype)
    function, remarks = compile_exported(Named().eval(), x, tmp_path)
    assert [r.severity for r in remarks] == ["remark"], remarks
    got = np.array(function(array(x)))
    comparison = reference.compare(got, expected(layer, x), KINDS[dtype])  # type: ignore[arg-type]
    assert comparison.relative_frobenius < 5e-3, comparison


@pytest.mark.parametrize(("n", "k"), [(32, 32), (8, 72)])
@pytest.mark.parametrize("activation", ["none", "mxfp8"])
def test_one_row_and_one_block(n: int, k: int, activation: str) -> None:
    """Dimensions of size 1 leave the maps of scales without a loop."""
    from iree.turbine import aot

    layer = MXLinear.from_linear(random_linear(n, k), activation=activation)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    x = random_rows(1, 1, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = str(aot.export(Named().eval(), args=(x,)).mlir_module)
    remarks: list[Remark] = []
    vmfb = block32.compile(text, target="cpu", on_remark=remarks.append)
    assert [r.severity for r in remarks] == ["remark"], remarks
    got = np.array(block32.load(vmfb)["main"](array(x)))
    comparison = reference.compare(got, expected(layer, x), "f32")
    assert comparison.ok, comparison


def test_keep_leaves_layers_alone() -> None:
    model = Model()
    conversion = convert_linear(model, keep=["do*"])
    assert conversion.kept == ["down"]
    assert type(model.down) is nn.Linear
    assert isinstance(model.up, MXLinear)
    assert "down: kept" in str(conversion)
    assert 0 < conversion.layers[0].error < 0.1


class Half(nn.Linear):
    """A layer that computes something else than ``nn.Linear``."""

    def forward(self, input: Any) -> Any:
        return super().forward(input) / 2


def test_subclasses_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Half(32, 32))
    convert_linear(model)
    assert isinstance(model[0], MXLinear)
    assert type(model[1]) is Half


def with_nan() -> nn.Module:
    model = Model()
    model.down.weight.data[3, 4] = float("nan")
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: nn.Linear(32, 32), {}, "use MXLinear.from_linear"),
        (Model, {"keep": ["lm_head"]}, "'lm_head' matches no linear layer of: up, again, down"),
        (nn.ReLU, {}, "expected linear layers to swap but there are none"),
        (with_nan, {}, "layer 'down': expected a finite weight but it has a NaN"),
        (Model, {"block": (32, 64)}, r"expected a block of \(1, 32\) or \(32, 32\)"),
        (Model, {"block": 32}, r"expected a block of \(1, 32\) or \(32, 32\) but got 32"),
        (Model, {"keep": "down"}, "expected a list of patterns as keep but got 'down'"),
        (lambda: nn.Sequential(nn.Linear(0, 3)), {}, "layer '0': expected sizes of at least 1"),
        (
            lambda: nn.Sequential(nn.Linear(32, 3, dtype=torch.complex64)),
            {},
            "layer '0': expected a weight of real numbers but it has torch.complex64 values",
        ),
        (
            lambda: nn.Sequential(nn.Linear(32, 3, device="meta")),
            {},
            "layer '0': expected a weight of real numbers but it has no values",
        ),
        (Model, {"activation": "int8"}, "expected an activation of none, mxfp8 but got 'int8'"),
        (Model, {"rule": "nearest"}, "expected a rule of floor, rceil, ceil, even but got"),
        (Model, {"keep": 5}, "expected a list of patterns as keep but got '5'"),
    ],
)
def test_what_cannot_be_converted_is_left_whole(make: Any, arguments: Any, message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        convert_linear(model, **arguments)
    assert not any(isinstance(layer, MXLinear) for layer in model.modules())


def test_what_is_no_module() -> None:
    with pytest.raises(ValueError, match=r"expected an nn\.Module but got list"):
        convert_linear([nn.Linear(32, 32)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected an nn\.Linear but got ReLU"):
        MXLinear.from_linear(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_the_operator_refuses(device: str) -> None:
    """When it runs, and when an exporter asks only for shapes."""
    quantize = torch.ops.block32.quantize_mxfp8
    matrix = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match="expected a rule of floor, rceil, ceil, even but got"):
        quantize(matrix, "nearest")
    with pytest.raises(ValueError, match=r"expected a matrix \[M, K\] but got \[1, 2, 64\]"):
        quantize(matrix[None], "rceil")
    with pytest.raises(ValueError, match=r"torch.float16 but got torch.int64"):
        quantize(matrix.long(), "rceil")


@pytest.mark.parametrize("activation", ["none", "mxfp8"])
def test_an_activation_that_does_not_fit(activation: str) -> None:
    """Integers would be multiplied by a weight that is rounded to integers."""
    layer = MXLinear(32, 3, activation=activation)
    for x in (torch.ones(2, 64), torch.ones(()), torch.ones(2, 32, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"expected floats of \[..., 32\] but got torch"):
            layer(x)


def test_encoders_of_pytorch_call_their_layers() -> None:
    """Outside training they would hand the weights' bytes to a kernel for floats."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = random_rows(2, 5, 32)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding)
        assert len(convert_linear(model, keep=["*linear1"]).layers) == 2
        got = model(x, src_key_padding_mask=padding)
    is_there = ~padding
    error = (got - wanted)[is_there].norm() / wanted[is_there].norm()
    assert 0 < error < 0.05


def test_checkpoints_load_by_their_bytes() -> None:
    """float8 tensors are no numbers to copy into bytes."""
    source = MXLinear.from_linear(random_linear(64, 64))
    state = source.state_dict()
    inverse = {
        "weight": state["weight"].view(torch.float8_e4m3fn),
        "weight_scale_inv": state["weight_scale"].view(torch.float8_e8m0fnu),
        "bias": state["bias"],
    }
    loaded = MXLinear(64, 64)
    loaded.load_state_dict(inverse)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with pytest.raises(ValueError, match="are both there"):
        loaded.load_state_dict({**inverse, "weight_scale": state["weight_scale"]})
    scale = state["weight_scale"]
    for wrong in (scale.float(), scale.view(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="float8_e8m0fnu in 'weight_scale' but got"):
            loaded.load_state_dict({**state, "weight_scale": wrong})


def test_converting_keeps_bytes_as_they_are() -> None:
    layer = MXLinear.from_linear(random_linear(64, 64))
    weight = layer.weight.clone()
    assert torch.equal(layer.to(torch.bfloat16).weight, weight)
