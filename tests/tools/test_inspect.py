# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 inspect``: what it reads from machine code, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from block32.dialects.kernel import KernelTier
from block32.lowering.problem import ScaledMatmul
from block32.tools.cli import main
from block32.tools.gfx950_executor import CodeObjectError, hsacos_from_vmfb, parse_code_object
from block32.tools.gfx950_inspect_launch import tier_of
from block32.tools.gfx950_listing import facts_of, occupancy
from block32.tools.inspect import Inspected, parse_kernel_name
from tests.lowering.gfx950.kernels import compile_kernels, needs_executor
from tests.modules import compiled

MODEL = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
func.func @main(%x: tensor<?x1024xf8E4M3FN>, %xs: tensor<?x32xf8E8M0FNU>,
    %w: tensor<64x1024xf8E4M3FN>, %ws: tensor<2x32xf8E8M0FNU>) -> tensor<?x64xbf16> {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x1024xf8E4M3FN>
  %empty = tensor.empty(%m) : tensor<?x64xbf16>
  %cst = arith.constant 0.0 : bf16
  %zero = linalg.fill ins(%cst : bf16) outs(%empty : tensor<?x64xbf16>) -> tensor<?x64xbf16>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<?x1024xf8E4M3FN>, tensor<?x32xf8E8M0FNU>,
        tensor<64x1024xf8E4M3FN>, tensor<2x32xf8E8M0FNU>)
    outs(%zero : tensor<?x64xbf16>) -> tensor<?x64xbf16>
  return %r : tensor<?x64xbf16>
}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with one dynamic matmul, compiled for gfx950."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "model.mlir").write_text(MODEL)
    output = folder / "model.vmfb"
    assert main(["compile", str(folder / "model.mlir"), "--target=gfx950", "-o", str(output)]) == 0
    return str(output)


@needs_executor
def test_json_has_every_kernel_and_its_loop(module: str, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", module, "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)
    assert [k["name"][:10] for k in kernels] == [f"gemm_tier{i}" for i in range(3)]
    for kernel in kernels:
        assert kernel["vgpr_spills"] == kernel["scratch_bytes"] == 0
        assert kernel["whole"]["classes"]["mfma"] > 0, "every tier uses the matrix unit"
    packed = kernels[0]
    assert packed["loop"]["classes"]["mfma"] == 12
    assert packed["loop"]["mfma_clocks"] == 12 * 32
    assert packed["loop"]["widths"]["global load 16"] == 36
    assert 0 < packed["estimate"]["busy"] <= 1
    assert packed["estimate"]["bytes_per_clock"] > 0


@needs_executor
def test_a_launch_is_estimated_for_the_most_rows_of_a_tier_or_those_asked_for(
    module: str, capsys: pytest.CaptureFixture[str]
):
    def launches(*arguments: str) -> list[dict[str, float]]:
        assert main(["inspect", module, "--json", *arguments]) == 0
        return [kernel["launch"] for kernel in json.loads(capsys.readouterr().out)]

    default, asked = launches(), launches("--m", "100")
    assert [launch["rows"] for launch in default] == [8, 32, 4096]
    assert [launch["rows"] for launch in asked] == [100] * 3
    assert asked[2]["workgroups"] == 2, "two tiles of 64 rows on 64 columns"
    for launch in default:
        assert launch["seconds"] >= launch["in_order_seconds"] > 0
        assert launch["seconds"] >= launch["least_seconds"]
        assert launch["memory_seconds"] > 0
        assert launch["matrix_seconds"] > 0


@needs_executor
def test_a_kernel_that_this_version_would_not_choose_has_no_launch(tmp_path: Path):
    problem = ScaledMatmul(m=64, n=64, k=512)
    tier = KernelTier("tiled", tile=(64, 64, 128), warps=1, stages=2)
    assert tier_of(problem, 0, threads=64) is None
    assert tier_of(problem, 1, threads=256) is None
    hsaco = compile_kernels(problem, (tier,))
    (kernel,) = parse_code_object(hsaco).kernels.values()
    assert Inspected.create(hsaco, kernel).launch is None


@needs_executor
def test_text_lists_registers_and_mix(module: str, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", module, "--kernel", "tier2"]) == 0
    text = capsys.readouterr().out
    assert "VGPR" in text
    assert "MFMA" in text


@needs_executor
def test_disassemble_prints_every_instruction(module: str, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", module, "--kernel", "tier2", "--disassemble"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("gemm_tier2")
    assert any("v_mfma_scale_f32_16x16x128_f8f6f4" in line for line in lines)
    assert "s_endpgm" in lines[-1]


@needs_executor
def test_execute_compares_with_the_reference(module: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["inspect", module, "--kernel", "tier0", "--execute", "--m", "3", "--json"]
    assert main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["verdict"]) == (3, "right")
    assert result["relative_error"] < 5e-3


@needs_executor
def test_execute_runs_an_activation_without_scales_but_no_unknown_epilogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = Path(__file__).parents[1] / "lowering" / "gfx950"
    arguments = ["--target=gfx950", "-o", str(tmp_path / "m.vmfb"), "--quiet"]
    assert main(["compile", str(source / "w8a16.mlir"), *arguments]) == 0
    assert main(["inspect", str(tmp_path / "m.vmfb"), "--execute", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["verdict"] for result in results] == ["right", "right"]
    assert main(["compile", str(source / "epilogue.mlir"), *arguments]) == 0
    assert main(["inspect", str(tmp_path / "m.vmfb"), "--execute", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert "8x96x512" in only["kernel"]


def test_execute_refuses_rows_of_another_tier(module: str, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", module, "--kernel", "tier0", "--execute", "--m", "20"]) == 1
    assert "tier 0 serves 1 to 8 rows but got 20" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--m=0",), "--m: expected a whole number from 1 on but got '0'"),
        (("--m=-4", "--execute"), "--m: expected a whole number from 1 on but got '-4'"),
        (("--seed=-1", "--execute"), "--seed: expected a whole number from 0 on but got '-1'"),
    ],
)
def test_numbers_that_make_no_sense(
    module: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
):
    with pytest.raises(SystemExit):
        main(["inspect", module, *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--execute"])
def test_a_listing_is_neither_json_nor_a_run(
    module: str, capsys: pytest.CaptureFixture[str], option: str
):
    assert main(["inspect", module, "--disassemble", option]) == 1
    assert "--disassemble: error: expected neither --json nor --execute" in capsys.readouterr().err


def test_a_module_without_gfx950_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model.vmfb").write_bytes(compiled())
    assert main(["inspect", str(tmp_path / "model.vmfb")]) == 1
    error = capsys.readouterr().err
    assert "error: no gfx950 code in this module" in error
    assert "--target=gfx950" in error


def test_a_file_that_is_no_module_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.vmfb").write_bytes(b"not a module at all")
    assert main(["inspect", str(tmp_path / "model.vmfb")]) == 1
    assert "model.vmfb: error: expected an IREE module but got" in capsys.readouterr().err


def test_a_truncated_or_damaged_module_is_refused(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = Path(module).read_bytes()
    start = data.index(b"\x7fELF")
    for end in (start + 20, start + 70, start + 3000, len(hsacos_from_vmfb(data)[0])):
        (tmp_path / "short.vmfb").write_bytes(data[:end])
        assert main(["inspect", str(tmp_path / "short.vmfb")]) == 1
        assert "short.vmfb: error: the module ends in the middle" in capsys.readouterr().err
    (tmp_path / "wrong.vmfb").write_bytes(data.replace(b"amdhsa.kernels", b"amdhsa.kernelz"))
    assert main(["inspect", str(tmp_path / "wrong.vmfb")]) == 1
    assert "error: the code object is truncated or damaged" in capsys.readouterr().err


def test_another_chip_is_named(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = bytearray(Path(module).read_bytes())
    data[data.index(b"\x7fELF") + 48] = 0x4C  # EF_AMDGPU_MACH of gfx942 in LLVM's ELF.h
    path = tmp_path / "other.vmfb"
    path.write_bytes(data.replace(b"gfx950", b"gfx942"))
    assert main(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert "error: no gfx950 code in this module" in error
    assert "the code object is for gfx942; compile for gfx950" in error


def test_a_code_object_that_is_cut_off_anywhere_is_refused():
    tier = KernelTier("packed", tile=(8, 16, 128), k_pack=2, warps=1, stages=1)
    hsaco = compile_kernels(ScaledMatmul(m=4, n=16, k=256), (tier,))
    for end in range(0, len(hsaco), 97):
        with pytest.raises(CodeObjectError):
            parse_code_object(hsaco[:end])


def test_a_missing_file_and_an_unknown_kernel_are_refused(
    module: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["inspect", "no.vmfb"]) == 1
    assert "error: cannot read the module" in capsys.readouterr().err
    assert main(["inspect", module, "--kernel", "conv"]) == 1
    assert "error: no kernel's name holds 'conv'" in capsys.readouterr().err


@needs_executor
def test_clocks_follow_the_formats():
    """Two 4-bit operands take half the time; with one 8-bit operand it is the full time."""
    tier = KernelTier("tiled", tile=(32, 32, 256), warps=1, stages=2, mma=(32, 32, 64))
    hsaco = compile_kernels(ScaledMatmul(m=32, n=32, k=512, rhs="f4E2M1FN"), (tier,))
    (kernel,) = parse_code_object(hsaco).kernels.values()
    facts = facts_of(hsaco, kernel)
    assert facts.whole.classes["mfma"] == 8
    assert facts.whole.mfma_clocks == 8 * 64


def test_occupancy():
    assert occupancy(registers=512, lds_bytes=0, threads=256) == 1
    assert occupancy(registers=128, lds_bytes=0, threads=256) == 4
    assert occupancy(registers=32, lds_bytes=64 * 1024, threads=256) == 2
    assert occupancy(registers=129, lds_bytes=0, threads=64) == 3


def test_a_kernel_name_says_what_it_computes():
    parsed = parse_kernel_name("gemm_tier2_0_Mx256x1280_e4m3_e2m1_1x32_bf16")
    assert parsed is not None
    assert (parsed.problem.m, parsed.problem.n, parsed.problem.k) == (None, 256, 1280)
    assert (parsed.problem.rhs, parsed.problem.rhs_block) == ("f4E2M1FN", (1, 32))
    assert parsed.tier == 2
    assert parse_kernel_name("gemm_tier0") is None
    assert parse_kernel_name("reduce_tier0_0_4x4x32_e4m3_e4m3_1x32_f32") is None
