# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 compile``: inputs, flags, dumps, errors that leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from iree.compiler.tools.binaries import find_tool

import block32
from block32.runtime.errors import CallError
from block32.tools import iree_compile
from block32.tools.cli import main
from block32.tools.compiler import CompileOptions, compile_source

PROGRAM = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
func.func @f(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]ATTRIBUTES
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>,
        tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
"""
GOOD = PROGRAM.replace("ATTRIBUTES", "")
NO_K = (
    GOOD.replace("4x64xf8", "4x0xf8").replace("32x64xf8", "32x0xf8").replace("x2xf8E8", "x0xf8E8")
)
DYNAMIC = """
#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
func.func @f(%x: tensor<?x64xf8E4M3FN>, %xs: tensor<?x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<?x32xf32> {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x64xf8E4M3FN>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m) : tensor<?x32xf32>
  %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x32xf32>) -> tensor<?x32xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>,
        tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%init : tensor<?x32xf32>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}
"""
MARKED = """
func.func @f(%x: tensor<4x64xf8E4M3FN>, %w: tensor<64x32xf8E4M3FN>, %i: tensor<4x32xf32>)
    -> tensor<4x32xf32> {
  %y = linalg.matmul {block32.rhs = {block = [16, 32], scale = @nothing}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<64x32xf8E4M3FN>)
      outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.mlir"
    path.write_text(GOOD)
    return path


def is_vmfb(content: bytes) -> bool:
    """A vmfb is a zip archive or a flatbuffer with its identifier behind the first four bytes."""
    return content[:2] == b"PK" or content[4:8] == b"IREE"


def test_a_file_becomes_a_vmfb_and_a_remark(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = model.with_suffix(".vmfb")
    assert main(["compile", str(model), "--target=cpu", "-o", str(output)]) == 0
    assert is_vmfb(output.read_bytes())
    assert f"{model}:10:8: remark: 4x32x64_e4m3_e4m3_32x32_f32: cpu " in capfd.readouterr().err
    assert sorted(p.name for p in model.parent.iterdir()) == ["model.mlir", "model.vmfb"]


def test_bytecode_and_stdin_are_inputs(model: Path, tmp_path: Path) -> None:
    bytecode = tmp_path / "model.mlirbc"
    subprocess.run(
        [find_tool("iree-opt"), str(model), "--emit-bytecode", "-o", str(bytecode)], check=True
    )
    for arguments, stdin in (([str(bytecode)], b""), (["-"], GOOD.encode())):
        done = subprocess.run(
            [sys.executable, "-m", "block32.tools.cli", "compile", *arguments, "--target=cpu"],
            input=stdin,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert is_vmfb(done.stdout)
        assert b"remark: 4x32x64" in done.stderr


def test_iree_flags_pass_through(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.mlir"
    flags = ["--compile-to=preprocessing", "--iree-llvmcpu-target-cpu=generic"]
    assert main(["compile", str(model), "--target=cpu", *flags, "-o", str(output)]) == 0
    text = output.read_text()
    assert "@block32_kernels_0_4x32x64_e4m3_e4m3_32x32_f32" in text
    assert 'cpu = "generic"' in text or "avx512" not in text.partition("hal.executable.source")[0]


def test_what_iree_prints_is_passed_on(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--iree-scheduling-dump-statistics-format=csv", "-iree-llvmcpu-target-cpu=generic"]
    output = model.with_suffix(".vmfb")
    assert main(["compile", str(model), "--target=cpu", "--quiet", *flags, "-o", str(output)]) == 0
    assert "Executables" in capfd.readouterr().err


def test_a_phase_before_the_passes_is_plain_iree(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.mlir"
    assert main(["compile", str(model), "--compile-to=input", "-o", str(output)]) == 0
    assert "linalg.scaled_contract" in output.read_text()


def test_the_ir_after_every_pass_is_written(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ir"
    command = ["compile", str(model), "--target=cpu", f"--dump-ir-after-all={folder}"]
    assert main([*command, "-o", str(tmp_path / "m.vmfb")]) == 0
    names = sorted(p.name for p in folder.iterdir())
    assert names[0] == "00-block32-raise.mlir"
    assert any(name.endswith("block32-emit.mlir") for name in names)


ERRORS = {
    "empty": ("", "bad.mlir:1:1: error: expected an MLIR module but the input is empty"),
    "truncated": (GOOD[:-60], "bad.mlir:"),
    "no MLIR": ("what is this", "bad.mlir:1:1: error: "),
    "truncated bytecode": ("ML\x00\x00", "error: "),
    "a malformed kernel": (
        PROGRAM.replace("ATTRIBUTES", ' {block32.kernel = {target = "cpu"}}'),
        "bad.mlir:10:8: error: 'linalg.scaled_contract' op has a malformed 'block32.kernel'",
    ),
    "a marked matmul that cannot be raised": (
        MARKED,
        "bad.mlir:4:8: error: 'linalg.matmul' op cannot be raised: missing 'block32.lhs'",
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_input_gets_a_located_line_and_leaves_nothing(
    text: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.mlir"
    path.write_text(text)
    output = tmp_path / "out.vmfb"
    assert main(["compile", str(path), "--target=cpu", "-o", str(output)]) == 1
    captured = capfd.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert [p.name for p in tmp_path.iterdir()] == ["bad.mlir"]


def test_a_failing_pass_names_itself_and_how_to_reproduce_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pass, its location, a command that gives the error again, and with a flag the IR."""
    path = tmp_path / "marked.mlir"
    path.write_text(MARKED)
    dump = f"--dump-ir-after-all={tmp_path / 'ir'}"
    assert main(["compile", str(path), "--target=cpu", dump, "-o", str(tmp_path / "m.vmfb")]) == 1
    err = capfd.readouterr().err
    assert f"{path}:4:8: error: 'linalg.matmul' op cannot be raised" in err
    assert "note: in pass 'block32-raise'" in err
    before = tmp_path / "ir" / "00-before-block32-raise.mlir"
    assert "block32.rhs = {block = [16, 32]" in before.read_text()
    command = err.partition("reproduce with: ")[2].splitlines()[0]
    command = command.replace("iree-compile", find_tool("iree-compile"), 1)
    command = command.replace("block32-opt", f"{sys.executable} -m block32.tools.opt", 1)
    again = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "missing 'block32.lhs'" in again.stderr


def test_a_failing_pass_over_what_an_importer_wrote(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Passes that run before IREE's, and those after them, have another command."""
    path = tmp_path / "model.mlir"
    torch_type = "!torch.vtensor<[2,64],f8E4M3FN>"
    path.write_text(f"""
func.func @f(%w: {torch_type}, %s: !torch.vtensor<[2,3],f32>) -> !torch.vtensor<[2,64],f32> {{
  %d = torch.operator "onnx.DequantizeLinear"(%w, %s) {{torch.onnx.block_size = 32 : si64}}
      : ({torch_type}, !torch.vtensor<[2,3],f32>) -> !torch.vtensor<[2,64],f32>
  return %d : !torch.vtensor<[2,64],f32>
}}
{MARKED.replace("@f(", "@g(")}""")
    for message in ("expected scales of shape 2x2 but got 2x3", "missing 'block32.lhs'"):
        assert main(["compile", str(path), "--target=cpu", "-o", str(tmp_path / "m.vmfb")]) == 1
        err = capfd.readouterr().err
        assert message in err
        command = err.partition("reproduce with: ")[2].splitlines()[0]
        assert command.startswith(f"block32-opt {path} --pass-pipeline=")
        command = command.replace("iree-compile", find_tool("iree-compile"))
        command = command.replace("block32-opt", f"{sys.executable} -m block32.tools.opt")
        again = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert again.returncode == 1
        assert message in again.stderr
        path.write_text(path.read_text().replace("[2,3]", "[2,2]"))


def test_warnings_come_before_the_error_that_they_explain(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model.write_text(GOOD.replace("f8E8M0FNU", "f8E4M3FN"))
    assert main(["compile", str(model), "--target=cpu", "-o", str(model) + ".vmfb"]) == 1
    warning, error = (
        line for line in capfd.readouterr().err.splitlines() if line.startswith(str(model))
    )
    assert "warning: " in warning
    assert "expected scales of type f8E8M0FNU but got f8E4M3FN" in warning
    assert "error: " in error


DEVICES = {
    (): "cpu",
    ("--iree-hal-target-device=local",): "cpu",
    ("--iree-hal-target-backends=llvm-cpu",): "cpu",
    ("--iree-hal-target-device=a=local[0]", "--iree-hal-target-device=b=local[1]"): "cpu",
    (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=vmvx",
    ): "portable",
    ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx950"): "gfx950",
    ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx942"): "portable",
    ("--iree-hal-target-device=cuda", "--iree-rocm-target=gfx950"): "portable",
    (
        "--iree-hal-target-device=local",
        "-iree-hal-target-device=hip",
        "--iree-rocm-target=gfx950",
    ): "portable",
    ("--iree-hal-target-device=vulkan",): "portable",
}


@pytest.mark.parametrize(("flags", "target"), DEVICES.items())
def test_the_target_follows_the_flags_for_devices(flags: tuple[str, ...], target: str) -> None:
    assert CompileOptions(flags=flags).target_name() == target


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--target=cpu", "--iree-hal-target-device=hip"],
            "--target=cpu is for llvm-cpu but the flags for devices ask for hip",
        ),
        (
            ["--target=gfx950", "-iree-hal-target-device=local"],
            "--target=gfx950 is for hip but the flags for devices ask for llvm-cpu",
        ),
        (["--compile-mode=precompile"], "--compile-mode=precompile leaves out block32's passes"),
        (
            ["--target=gfx950", "--cpu=znver4"],
            "--cpu=znver4 names a CPU, but the target is gfx950, which runs on hip",
        ),
        (
            ["--iree-hal-target-device=vulkan", "--cpu=znver4"],
            "--cpu=znver4 names a CPU, but the target is portable, which runs on vulkan",
        ),
        (
            ["--cpu=znver4", "--iree-llvmcpu-target-cpu=host"],
            "--cpu=znver4 and --iree-llvmcpu-target-cpu=host both name the CPU",
        ),
        (
            ["--target=gfx950", "--iree-rocm-target=gfx942"],
            "--target=gfx950 is not for the chip of --iree-rocm-target=gfx942",
        ),
        (["--target=vax"], "unknown target 'vax'; expected one of cpu"),
        (["--target=cpu", "--cpu=z80"], "z80"),
        (["--target=cpu", "--cpu="], "expected the name of a CPU"),
        (["--version"], "iree-compile printed 'IREE (https://iree.dev):' instead of a module"),
        (["--target=cpu", "--no-such-flag"], "no-such-flag"),
        (["--target=cpu", "--compile-from=flow"], "starts after block32's passes"),
        (["--target=cpu", "second.mlir"], "expected one input but got"),
    ],
)
def test_bad_flags_are_refused(
    flags: list[str], message: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = model.with_suffix(".vmfb")
    assert main(["compile", str(model), *flags, "-o", str(output)]) == 1
    captured = capfd.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not output.exists()


def test_a_missing_input_and_an_unwritable_output(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", str(tmp_path / "none.mlir"), "-o", "x.vmfb"]) == 1
    assert "cannot read the input: no such file or directory" in capfd.readouterr().err
    target = tmp_path / "no" / "such" / "folder.vmfb"
    assert main(["compile", str(model), "--quiet", "-o", str(target)]) == 1
    assert "cannot write the output: no such file or directory" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", ".", "/dev/full", "x" * 300])
def test_no_output_of_any_name_is_a_traceback(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["compile", str(model), "--compile-to=input", "-o", name]) == 1
    assert ": error: cannot write the output: " in capfd.readouterr().err
    assert [p.name for p in model.parent.iterdir()] == ["model.mlir"]


def test_an_output_never_takes_the_place_of_the_input(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = model.with_name("link.mlir")
    link.symlink_to(model.name)
    before = model.read_text()
    assert main(["compile", str(model), "-o", str(link)]) == 1
    assert f"{link}: error: this file is also an input" in capfd.readouterr().err
    assert model.read_text() == before


def test_a_missing_iree_compile_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def not_found(name: str) -> str:
        raise ValueError(f"IREE compiler tool '{name}' was not found")

    monkeypatch.setattr(iree_compile, "find_tool", not_found)
    assert main(["compile", str(model), "-o", str(model.with_suffix(".vmfb"))]) == 1
    assert "error: the program iree-compile is missing; install" in capfd.readouterr().err
    # `doctor` says it in its report.
    iree_compile.device_facts.cache_clear()
    assert main(["doctor", "--json"]) == 1
    assert "the compiler cannot name it: the program iree-compile is missing" in (
        capfd.readouterr().out
    )


def test_an_output_that_is_a_link_stays_one(model: Path) -> None:
    link, file = model.with_name("link.mlir"), model.with_name("file.mlir")
    link.symlink_to(file.name)
    assert main(["compile", str(model), "--compile-to=input", "-o", str(link)]) == 0
    assert link.is_symlink()
    assert "linalg.scaled_contract" in file.read_text()


def test_a_device_is_written_to_and_not_replaced(model: Path) -> None:
    assert main(["compile", str(model), "--compile-to=input", "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_compile_leaves_nothing(ending: signal.Signals, tmp_path: Path) -> None:
    """Ended where there are temporary files, and an iree-compile that reads them."""
    path = tmp_path / "model.mlir"
    path.write_text(GOOD)
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "block32.tools.cli", "compile", str(path), "--target=cpu"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out.vmfb")],
        env=os.environ | {"TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(ending, signal.SIG_DFL),
    )
    while not list(folder.glob("block32-*/*")):
        assert process.poll() is None, "the compile ended before it could be interrupted"
        time.sleep(0.001)
    process.send_signal(ending)
    assert process.communicate(timeout=60)[1].endswith("block32: interrupted\n")
    assert process.returncode == 130
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.mlir", "temporary"]


def test_an_old_output_survives_a_failed_compile(tmp_path: Path) -> None:
    path = tmp_path / "bad.mlir"
    path.write_text(MARKED)
    output = tmp_path / "out.vmfb"
    output.write_bytes(b"old")
    assert main(["compile", str(path), "--target=cpu", "-o", str(output)]) == 1
    assert output.read_bytes() == b"old"


def test_no_k_at_all_is_an_error_and_no_crash(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """IREE ends by a signal on any matmul with K = 0."""
    model.write_text(NO_K)
    assert main(["compile", str(model), "--target=cpu", "-o", "/dev/null"]) == 1
    error = capfd.readouterr().err
    assert f"{model}:10:8: error: 'linalg.scaled_contract' op cannot be compiled: " in error
    assert "expected K of at least 1 but got 0" in error


CUDA_DEVICE = """module attributes {hal.device.targets = [#hal.device.target<"cuda",
    [#hal.executable.target<"cuda", "cuda-nvptx-fb", {iree_codegen.target_info =
      #iree_gpu.target<arch = "sm_89", features = "", wgp = <compute = fp32, storage = b32,
        subgroup = shuffle, subgroup_size_choices = [32], max_workgroup_sizes = [1024, 1024, 1024],
        max_thread_count_per_workgroup = 1024, max_workgroup_memory_bytes = 49152,
        max_workgroup_counts = [2147483647, 65535, 65535]>>}>]> : !hal.device]} {"""
CPU_DEVICE = """module attributes {hal.device.targets = [#hal.device.target<"local",
    [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64", {cpu = "x86-64",
      cpu_features = "+sse2", native_vector_size = 16 : i64,
      target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device]} {"""


def with_devices(devices: str) -> str:
    maps, function = GOOD.split("func.func")
    return f"{maps}{devices}\nfunc.func{function}}}"


def test_a_module_for_other_devices_than_the_target(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """IREE follows the module, and would compile our kernels for a device that they are not for."""
    model.write_text(with_devices(CUDA_DEVICE))
    assert main(["compile", str(model), "--target=cpu", "-o", "/dev/null"]) == 1
    error = capfd.readouterr().err
    assert f"{model}:7:1: error: 'builtin.module' op names devices of its own (cuda); " in error
    assert "expected llvm-cpu for --target=cpu" in error


def test_without_a_target_the_devices_of_the_module_count(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model.write_text(with_devices(CUDA_DEVICE))
    flags = ["--compile-to=preprocessing", "-o", str(model.with_suffix(".out"))]
    assert main(["compile", str(model), *flags]) == 0
    assert ": portable portable (" in capfd.readouterr().err


def test_kernels_use_the_features_that_the_module_names(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not those of this machine, which the module's code may not use."""
    model.write_text(with_devices(CPU_DEVICE))
    assert main(["compile", str(model), "--target=cpu", "-o", "/dev/null"]) == 0
    assert ": cpu generic " in capfd.readouterr().err


def test_x_and_its_scales_with_other_numbers_of_rows(tmp_path: Path) -> None:
    """A kernel would read past the end of the scales."""
    module = block32.load(block32.compile(DYNAMIC, target="cpu"))
    w, w_scale = np.zeros((32, 64), np.uint8), np.zeros((1, 2), np.uint8)
    assert module["f"](np.zeros((3, 64), np.uint8), np.zeros((3, 2), np.uint8), w, w_scale).shape
    with pytest.raises(
        CallError, match="expected x and its scales to have the same number of rows"
    ):
        module["f"](np.zeros((4, 64), np.uint8), np.zeros((3, 2), np.uint8), w, w_scale)


def test_the_check_of_rows_costs_no_further_submission() -> None:
    """Two matmuls, the check of the second between them, are one command buffer."""
    text = DYNAMIC.replace("return %y", "%z = arith.addf %y, %y2 : tensor<?x32xf32>\n  return %z")
    second = DYNAMIC.partition("  %y = ")[2].partition("  return")[0]
    second = f"  %y2 = {second}".replace("%xs,", "%xs2,")
    text = text.replace("  %z = ", f"{second}  %z = ").replace(
        "%ws: tensor", "%xs2: tensor<?x2xf8E8M0FNU>, %ws: tensor", 1
    )
    options = CompileOptions(target="cpu", flags=("--compile-to=stream",))
    stream = compile_source(text.encode(), "<text>", options).decode()
    assert stream.count("cf.assert") == 2
    assert stream.count("stream.cmd.execute") == 1
