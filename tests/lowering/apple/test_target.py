# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The target: which tiers it takes, and models through the whole pipeline into a vmfb."""

from __future__ import annotations

import dataclasses
import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from iree import runtime
from iree.compiler import ir

import block32
from block32.dialects.diagnostics import DiagnosticError
from block32.dialects.kernel import KernelTier
from block32.lowering.apple import executable, install
from block32.lowering.apple.target import AppleM5Target
from block32.lowering.common.index import IndexValue, as_value
from block32.lowering.host import build_standalone_module
from block32.lowering.kernel_module import KernelSpec
from block32.lowering.problem import Epilogue, ScaledMatmul
from block32.lowering.target import DeviceFacts, Launch
from block32.lowering.targets import target_named
from block32.tools.air_emulator.dispatch import Binding
from block32.tools.air_emulator.vmfb import LoadedKernel, load_kernels
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions, compile_source, finish_module
from block32.tools.iree_compile import run_iree_compile
from tests.numbers import random_operands

TARGET = AppleM5Target()
FACTS = DeviceFacts(architecture="apple")
PROBLEM = ScaledMatmul(m=None, n=96, k=160)
LAUNCH = Launch("gemm", PROBLEM.operand_names, ("result",))
OPTIONS = CompileOptions(target="apple-m5")


def _tiers(problem: ScaledMatmul) -> tuple[KernelTier, ...]:
    config = TARGET.select(problem, FACTS).config
    assert config is not None and config.target == "apple-m5"
    return config.tiers


@pytest.mark.parametrize(
    ("m", "n", "k", "forms"),
    [
        (None, 64, 64, ["gemv", "tiled"]),
        (None, 65, 64, ["tiled"]),
        (1, 64, 64, ["gemv"]),
        (1, 65, 64, ["tiled"]),
        (2, 64, 64, ["tiled"]),
    ],
)
def test_one_row_of_a_weight_that_is_not_wide_gets_the_gemv(
    m: int | None, n: int, k: int, forms: list[str]
) -> None:
    tiers = _tiers(ScaledMatmul(m=m, n=n, k=k))
    assert [tier.form for tier in tiers] == forms
    assert [tier.max_m for tier in tiers] == [1, None][-len(tiers) :]
    assert all(TARGET.verify(ScaledMatmul(m=m, n=n, k=k), tier, FACTS) is None for tier in tiers)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ScaledMatmul(m=4, n=64, k=64, rhs="f4E2M1FN"), "w of type f4E2M1FN has no kernel"),
        (ScaledMatmul(m=4, n=64, k=2**31), "K = 2147483648 is outside"),
    ],
)
def test_what_has_no_kernel_is_left_with_the_reason(problem: ScaledMatmul, reason: str) -> None:
    selection = TARGET.select(problem, FACTS)
    assert selection.config is None and reason in selection.reason


@pytest.mark.parametrize(
    ("tier", "reason"),
    [
        (KernelTier(form="packed"), "no form 'packed' for one weight; expected tiled or gemv"),
        (KernelTier(form="tiled", tile=(128, 64, 32)), "only [64, 64, 32] exists"),
        (KernelTier(form="tiled", mma=(8, 8, 8)), "only [16, 16, 16] exists"),
        (KernelTier(form="tiled", splits=2), "splits = 2; kernels of this target have no splits"),
        (KernelTier(form="gemv"), "form 'gemv' computes one row; expected max_m = 1"),
    ],
)
def test_a_users_choice_that_does_not_exist_is_refused(tier: KernelTier, reason: str) -> None:
    answer = TARGET.verify(PROBLEM, tier, FACTS)
    assert answer is not None and reason in answer


def test_the_hosts_grid_is_the_kernels() -> None:
    """The count region's arithmetic, run by IREE's VM, against plain integers."""
    rows = [0, 1, 63, 64, 65, 128, 129, 1000, 8192, 10**6]
    with ir.Context(), ir.Location.unknown():
        index = ir.IndexType.get()
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = ir.Operation.create(
                "func.func",
                attributes={
                    "sym_name": ir.StringAttr.get("grid"),
                    "function_type": ir.TypeAttr.get(ir.FunctionType.get([index], [index] * 2)),
                },
                regions=1,
            )
            block = function.regions[0].blocks.append(index, arg_locs=[ir.Location.unknown()])
            with ir.InsertionPoint(block):
                m = IndexValue(block.arguments[0])
                extents = [
                    as_value(TARGET.workgroups(PROBLEM, KernelTier(form=form), LAUNCH, m)[0])
                    for form in ("tiled", "gemv")
                ]
                ir.Operation.create("func.return", operands=extents)
        text = str(module).encode()
    vmfb = run_iree_compile(
        ["-", "--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx"],
        stdin=text,
    )
    config = runtime.Config("local-sync")
    grid = runtime.load_vm_module(
        runtime.VmModule.copy_buffer(config.vm_instance, vmfb), config
    ).grid
    for m in rows:
        expected = [
            TARGET.workgroups(PROBLEM, KernelTier(form=form), LAUNCH, m)[0]
            for form in ("tiled", "gemv")
        ]
        assert list(grid(m)) == expected


def _standalone(problem: ScaledMatmul) -> bytes:
    """A vmfb with one function for the problem, through the passes' own code."""
    with ir.Context(), ir.Location.unknown():
        spec = KernelSpec(problem, TARGET, _tiers(problem))
        module = build_standalone_module(spec)
        text = module.operation.get_asm(enable_debug_info=True)
    with ir.Context():
        return finish_module(ir.Module.parse(text), "standalone", OPTIONS, phase="start")


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        ScaledMatmul(m=None, n=130, k=96, rhs_block=(1, 32), result="bf16"),
        ScaledMatmul(m=33, n=40, k=100, lhs="f8E5M2"),
    ],
    ids=ScaledMatmul.describe,
)
@pytest.mark.parametrize("m", [1, 33, 129])
def test_numbers_from_the_vmfb(problem: ScaledMatmul, m: int) -> None:
    """The tier that the runtime would take for this M, its grid, its bindings in ABI order."""
    if problem.m is not None and problem.m != m:
        pytest.skip("another static M")
    kernels = list(load_kernels(_cached(problem)).items())
    tiers = _tiers(problem)
    number = next(i for i, tier in enumerate(tiers) if tier.max_m is None or m <= tier.max_m)
    name, kernel = kernels[number]
    assert name.endswith(f"gemm_tier{number}") and len(kernels) == len(tiers)
    operands = random_operands(problem, m, seed=m)
    y = np.full((m, problem.n), np.nan, np.float32)
    y = y.astype(np.float32 if problem.result == "f32" else "bfloat16")
    inputs = [operands.lhs, operands.rhs, operands.lhs_scale, operands.rhs_scale]
    x, y_, z = (int(e) for e in TARGET.workgroups(problem, tiers[number], LAUNCH, m))  # type: ignore[arg-type]
    constants = [m] if problem.m is None else []
    _dispatch(kernel, inputs, y, (x, y_, z), constants)
    expected = operands.expected()
    tolerance = 1e-5 if problem.result == "f32" else 2.0**-8
    error = np.abs(y.astype(np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


_VMFBS: dict[ScaledMatmul, bytes] = {}


def _cached(problem: ScaledMatmul) -> bytes:
    if problem not in _VMFBS:
        _VMFBS[problem] = _standalone(problem)
    return _VMFBS[problem]


def _dispatch(
    kernel: LoadedKernel,
    inputs: list[np.ndarray],
    y: np.ndarray,
    grid: tuple[int, int, int],
    constants: list[int],
) -> None:
    kernel.dispatch([*map(Binding, inputs), Binding(y, output=True)], grid, constants)


def test_an_epilogue_reaches_the_kernel_in_abi_order() -> None:
    epilogue = Epilogue(row_scale=True, bias="bf16", residual="f32", activation="relu")
    problem = dataclasses.replace(PROBLEM, epilogue=epilogue)
    (found,) = executable.find_all(_standalone(problem))
    assert {len(pipeline.bindings) for pipeline in found.pipelines} == {8}


MODEL = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
func.func @main(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>,
    %v: tensor<4x96xf8E4M3FN>, %vs: tensor<4x3xf8E8M0FNU>,
    %u: tensor<32x96xf8E4M3FN>, %us: tensor<1x3xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %a = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
        tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  %b = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%v, %vs, %u, %us : tensor<4x96xf8E4M3FN>, tensor<4x3xf8E8M0FNU>,
        tensor<32x96xf8E4M3FN>, tensor<1x3xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  %a2 = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
        tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  %c = arith.mulf %a, %b : tensor<4x32xf32>
  %empty = tensor.empty() : tensor<4x32xf32>
  %d = linalg.softmax dimension(1) ins(%c : tensor<4x32xf32>) outs(%empty : tensor<4x32xf32>)
      -> tensor<4x32xf32>
  %e = arith.addf %d, %a2 : tensor<4x32xf32>
  return %e : tensor<4x32xf32>
}
"""

#: A model without a block-scaled matmul.
PLAIN = """
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = arith.addf %x, %x : tensor<8xf32>
  return %y : tensor<8xf32>
}
"""

#: Rows that come at run time, in place of MODEL's four.
DYNAMIC_ZERO = """%c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x64xf8E4M3FN>
  %f0 = arith.constant 0.0 : f32
  %e0 = tensor.empty(%m) : tensor<?x32xf32>
  %zero = linalg.fill ins(%f0 : f32) outs(%e0 : tensor<?x32xf32>) -> tensor<?x32xf32>"""


def test_a_model_mixes_our_kernels_with_irees() -> None:
    """Two problems that differ in K alone keep their own kernels; the repeated one shares."""
    found = list(executable.find_all(block32.compile(MODEL, target="apple-m5")))
    ours = [e for e in found if e.metallib is not None]
    assert len(ours) == 2 and len(found) > 2
    hashes = {e.metallib.functions[0].sha256 for e in ours if e.metallib is not None}
    assert len(hashes) == 2


def test_stopping_before_phase_hal_keeps_the_kernels_in_the_module() -> None:
    options = dataclasses.replace(OPTIONS, flags=("--compile-to=flow",))
    text = compile_source(MODEL.encode(), "model.mlir", options).decode()
    assert install.ATTRIBUTE in text and "flow.dispatch" in text


def test_stopping_at_phase_hal_gives_the_replaced_binaries() -> None:
    options = dataclasses.replace(OPTIONS, flags=("--compile-to=hal",))
    text = compile_source(MODEL.encode(), "model.mlir", options).decode()
    assert install.ATTRIBUTE not in text
    binaries = re.findall(r'format = "metal-msl-fb", data = dense<"0x([0-9A-F]*)">', text)
    assert sum(b"MTLB" in bytes.fromhex(binary) for binary in binaries) == 2


def test_nothing_calls_the_tools_of_xcode() -> None:
    """On a Mac, IREE compiles Metal source with them unless it is told not to."""
    assert "--iree-metal-compile-to-metallib=false" in OPTIONS.target_flags()


@pytest.mark.parametrize("name", ["apple-m2", "apple-m3", "apple-m4"])
def test_a_chip_that_another_target_serves_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(DiagnosticError, match=f"no target '{name}': .* use --target=apple-m1"):
        target_named(name)


def test_another_llvmlite_is_refused_where_a_kernel_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error with the cure and no output; a model without such kernels needs no llvmlite."""
    installed = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.44.0" if name == "llvmlite" else installed(name)
    )
    model, output = tmp_path / "model.mlir", tmp_path / "model.vmfb"
    command = ["compile", str(model), "--target=apple-m5", "-o", str(output)]
    model.write_text(MODEL)
    assert main(command) == 1 and not output.exists()
    error = capsys.readouterr().err
    assert "needs llvmlite 0.43.0 (LLVM 14, typed pointers) but 0.44.0 is installed" in error
    assert "pip install 'block32[apple]'" in error and "Traceback" not in error
    model.write_text(PLAIN)
    assert main(command) == 0 and output.exists()


def test_another_device_is_refused() -> None:
    """Kernels for Metal do not fit into executables of another format: refused before a compile."""
    options = dataclasses.replace(
        OPTIONS,
        flags=("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx"),
    )
    with pytest.raises(DiagnosticError, match=r"apple-m5 is for metal but the flags .* vmvx"):
        compile_source(MODEL.encode(), "model.mlir", options)


@pytest.mark.parametrize("platform", ["ios", "ios-simulator"])
def test_another_platform_is_refused_and_nothing_written(
    platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library says macOS; a loader of another system would not take it."""
    model, output = tmp_path / "model.mlir", tmp_path / "model.vmfb"
    model.write_text(MODEL)
    flag = f"--iree-metal-target-platform={platform}"
    assert main(["compile", str(model), "--target=apple-m5", flag, "-o", str(output)]) == 1
    error = capsys.readouterr().err
    assert f"apple-m5 are for macOS but the flags ask for {platform}; leave out" in error
    assert not output.exists()


def test_the_platform_that_the_kernels_are_for_may_be_named() -> None:
    assert TARGET.refused_flag(("--iree-metal-target-platform=macos",)) is None
    assert TARGET.refused_flag(()) is None


def test_a_k_that_no_index_holds_is_named_where_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No kernel of ours; IREE's own Metal code generation has no such index either."""
    model = tmp_path / "model.mlir"
    maps, k = MODEL[: MODEL.index("func.func")], 2**31
    types = [f"4x{k}xf8E4M3FN", f"4x{k // 32}xf8E8M0FNU"]
    types += [f"32x{k}xf8E4M3FN", f"1x{k // 32}xf8E8M0FNU"]
    x, xs, w, ws = (f"tensor<{kind}>" for kind in types)
    model.write_text(f"""{maps}
func.func @main(%x: {x}, %xs: {xs}, %w: {w}, %ws: {ws}, %z: tensor<4x32xf32>) -> tensor<4x32xf32> {{
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : {x}, {xs}, {w}, {ws})
    outs(%z : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}}
""")
    command = ["compile", str(model), "--target=apple-m5", "--compile-to=flow"]
    assert main([*command, "-o", str(tmp_path / "model.flow")]) == 0
    remark = (
        r"model.mlir:\d+:\d+: remark: .*K = 2147483648 is outside what an i32 index holds; expect"
    )
    assert re.search(remark, capsys.readouterr().err)


def test_a_model_that_names_another_device_is_refused() -> None:
    """Its device comes before the flags'; kernels for Metal would not fit into its executables."""
    maps, function = MODEL[: MODEL.index("func.func")], MODEL[MODEL.index("func.func") :]
    executable = '#hal.executable.target<"vmvx", "vmvx-bytecode-fb">'
    device = f'#hal.device.target<"local", [{executable}]> : !hal.device'
    model = f"{maps}module attributes {{hal.device.targets = [{device}]}} {{\n{function}}}\n"
    with pytest.raises(DiagnosticError, match=r"devices of its own \(vmvx\); expected metal"):
        compile_source(model.encode(), "model.mlir", OPTIONS)


FOREIGN = """
module attributes {block32.air = [{name = "kernel"}]} {
  hal.executable private @foreign {
    hal.executable.binary public @vmvx <{
        data = dense<[1, 2, 3, 4]> : vector<4xi8>, format = "vmvx-bytecode-fb"}>
  }
}
"""


def test_an_executable_of_another_format_is_refused() -> None:
    """The last check, behind those of flags and of the model: what Metal cannot load stays out."""
    with ir.Context():
        module = ir.Module.parse(FOREIGN)
        with pytest.raises(DiagnosticError, match="has format 'vmvx-bytecode-fb'; the"):
            TARGET.finish_binaries(module)


def test_an_export_without_a_kernel_is_refused() -> None:
    """Two tiers, of which only one was recorded."""
    options = dataclasses.replace(OPTIONS, flags=("--compile-to=flow",))
    model = MODEL.replace("tensor<4x", "tensor<?x").replace("tensor.empty()", "tensor.empty(%m)")
    model = model.replace("%zero = arith.constant dense<0.0> : tensor<?x32xf32>", DYNAMIC_ZERO)
    text = compile_source(model.encode(), "model.mlir", options).decode()
    text = re.sub(r'name = "gemm_tier0[^"]*"', 'name = "another"', text)
    lowered = run_iree_compile(
        ["-", "--compile-from=flow", "--compile-to=hal", *OPTIONS.target_flags()],
        stdin=text.encode(),
    )
    with ir.Context():
        module = ir.Module.parse(lowered.decode())
        with pytest.raises(DiagnosticError, match="no kernel was recorded for the export"):
            TARGET.finish_binaries(module)
