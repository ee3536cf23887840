# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 run`` from its command line to what it prints, saves and refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime import reference
from block32.tools import run as command
from tests.modules import GFX950, ONE, compiled


@pytest.fixture(scope="module")
def vmfb(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("run") / "m.vmfb"
    path.write_bytes(compiled())
    return str(path)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["run", *arguments])
    return options.handler(options)


def test_generates_inputs_and_prints_results(vmfb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(vmfb) == 0
    first = capsys.readouterr().out
    assert "result 0: 4x64xf32\n" in first
    assert "result 1: 4x2xf8E8M0FNU (bytes)\n" in first
    run(vmfb)
    assert capsys.readouterr().out == first  # the same on every run


def test_reads_files_and_saves_results(
    vmfb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(2)
    codes, scales = rng.integers(0, 0x7F, (4, 64), np.uint8), rng.integers(0, 256, (4, 2), np.uint8)
    np.save(tmp_path / "x.npy", codes)
    (tmp_path / "s.bin").write_bytes(scales.tobytes())
    inputs = (f"--input=@{tmp_path}/x.npy", f"--input=@{tmp_path}/s.bin:4x2xf8E8M0FNU")
    outputs = (f"--output=@{tmp_path}/y.npy", f"--output=@{tmp_path}/t.bin")
    assert run(vmfb, *inputs, *outputs) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), reference.decode(codes))
    assert (tmp_path / "t.bin").read_bytes() == scales.tobytes()
    assert f"result 0: 4x64xf32, saved to {tmp_path}/y.npy" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.bin", "t.bin", "x.npy", "y.npy"]


def test_fills_dynamic_dimensions(vmfb: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(vmfb, "--function=scale", "--dim=M=3")
    assert "result 0: 3x4xf32" in capsys.readouterr().out
    run(
        vmfb,
        "--function=scale",
        "--dim=M=3",
        "--dim=0.0=2",
        "--full",
        "--input=2x4xf32=1",
        "--input=4",
        "--input=3",
    )
    out = capsys.readouterr().out
    assert "result 0: 2x4xf32\n[[3. 3. 3. 3.]\n [3. 3. 3. 3.]]" in out
    assert "result 1: int: 5" in out


def test_times_repeats(vmfb: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(vmfb, "--function=scale", "--dim=M=3", "--repeat=4")
    out = capsys.readouterr().out
    assert "median ms" in out
    assert " 4 " in out


def test_takes_the_only_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE))
    assert run(str(path), "--input=1,2,3,4") == 0
    assert "[2. 4. 6. 8.]" in capsys.readouterr().out


BAD_COMMANDS = [
    (("--function=man",), "no function 'man'; expected one of: main, scale, twice"),
    (("--device=gpu",), "unknown device 'gpu'"),
    (("--function=scale",), "dimension 0 of tensor<?x4xf32> has no size; give --dim=M=SIZE"),
    (("--dim=N=4",), "expected M=SIZE or INPUT.DIM=SIZE"),
    (("--dim=M=x",), "expected M=SIZE or INPUT.DIM=SIZE"),
    (("--input=zeros",) * 3, "the function has 2 arguments but got 3 inputs"),
    (("--input=4x63xf8E4M3FN=zeros",), "argument 0: expected tensor<4x64xf8E4M3FN> but got"),
    (("--input=@missing.npy",), "cannot read missing.npy: no such file or directory"),
    (("--output=y.npy",), "expected @FILE"),
    (
        ("--output=@a", "--output=@b", "--output=@c"),
        "the function has 2 results but 3 are to be saved",
    ),
    (("--output=@missing/y.npy",), "cannot write the output: no such file or directory"),
    (("--output=@-",), "this output cannot go there; expected a file name"),
    (("--output=@y.npy", "--output=@y.npy"), "this file is also an input or another output"),
    (("--function=scale", "--dim=M=2", "--dim=0.1=4"), "expected INPUT.DIM of a dynamic dimension"),
    (("--function=scale", "--dim=M=2", "--dim=1.0=4"), "expected INPUT.DIM of a dynamic dimension"),
    (("--function=scale", "--dim=M=2", "--dim=9.0=4"), "expected INPUT.DIM of a dynamic dimension"),
    (("--function=scale", "--dim=M=9999999999999"), "bytes for one tensor are too many"),
    (("--parameters=",), "expected [SCOPE=]FILE"),
    (("--parameters=model=",), "expected [SCOPE=]FILE"),
    (("--parameters=a=x", "--parameters=a=y"), "the scope 'a' already has x"),
    (("--parameters=a=missing",), "cannot read the parameters: no such file or directory"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_COMMANDS)
def test_refuses(
    vmfb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiagnosticError) as caught:
        run(vmfb, *arguments)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert not list(tmp_path.iterdir())


def test_an_output_never_takes_the_place_of_the_module(vmfb: str) -> None:
    before = Path(vmfb).read_bytes()
    with pytest.raises(DiagnosticError, match="also an input or another output"):
        run(vmfb, f"--output=@{vmfb}")
    assert Path(vmfb).read_bytes() == before


def test_an_input_that_memory_does_not_hold(vmfb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(command, "random_value", no_memory)
    with pytest.raises(DiagnosticError, match="too large for the memory") as caught:
        run(vmfb)
    assert caught.value.location == "input 0"


@pytest.mark.parametrize("repeat", ["0", "-3", "x", ""])
def test_repeats_are_counted_from_1(
    vmfb: str, repeat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(vmfb, f"--repeat={repeat}")
    assert f"expected a whole number from 1 on but got '{repeat}'" in capsys.readouterr().err


def test_refuses_to_choose_among_functions(tmp_path: Path) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE.replace(b"}", b"}\n") + ONE.replace(b"@only", b"@other")))
    with pytest.raises(DiagnosticError, match="expected --function=NAME, one of: only, other"):
        run(str(path))


def test_refuses_a_module_for_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE, GFX950))
    with pytest.raises(DiagnosticError, match="needs gfx950"):
        run(str(path))


def test_refuses_what_is_no_module(tmp_path: Path) -> None:
    path = tmp_path / "m.vmfb"
    for content in (b"", b"text", compiled(ONE)[:1000]):
        path.write_bytes(content)
        with pytest.raises(DiagnosticError) as caught:
            run(str(path))
        assert caught.value.render().startswith(f"{path}: error: ")
