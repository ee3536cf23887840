# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 doctor``: each finding on made-up machines, and the command as a whole on this one."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.target import DeviceFacts
from block32.runtime.archive import NewEntry, write_archive
from block32.runtime.errors import VmfbError
from block32.runtime.fit import Requirement
from block32.runtime.machine import Device, Machine
from block32.runtime.vmfb import read_vmfb
from block32.tools import doctor
from block32.tools.options import CompileOptions
from tests.modules import GFX950, ONE, PARAMETERS, compiled, with_hal_version

PC = Machine("x86_64", "Linux", {}, (Device("local-task", ("default",)),), 7, "3.13.0")
MI350 = replace(PC, devices=(Device("hip", ("AMD Instinct MI355X",), chips=("gfx950",)),))


def by_subject(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in findings}


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    options, options.iree_flags = parser.parse_known_args(["doctor", *arguments])
    return options.handler(options)


def test_equal_versions_are_fine() -> None:
    found = doctor.check_versions("3.13.0", "3.13.0")
    assert {finding.status for finding in found} == {"ok"}


@pytest.mark.parametrize(
    ("compiler", "runtime", "cure"),
    [
        ("3.13.0", "3.11.0", "iree-base-compiler==3.13.0 iree-base-runtime==3.13.0"),
        ("3.13.0", None, "iree-base-compiler==3.13.0 iree-base-runtime==3.13.0"),
        (None, "3.11.0", "iree-base-compiler==3.11.0 iree-base-runtime==3.11.0"),
    ],
)
def test_unequal_versions_are_bad(compiler: str | None, runtime: str | None, cure: str) -> None:
    found = by_subject(doctor.check_versions(compiler, runtime))
    for half in ("IREE compiler", "IREE runtime"):
        assert found[half].status == "bad"
        assert found[half].cure == f"pip install {cure}"


def test_devices_without_a_driver_are_a_note() -> None:
    machine = replace(MI350, devices=(*MI350.devices, Device("cuda", problem="no libcuda")))
    found = by_subject(doctor.check_devices(machine))
    assert found["device hip"].found == "AMD Instinct MI355X (gfx950)"
    assert (found["device cuda"].status, found["device cuda"].found) == ("note", "no libcuda")


def test_extras_are_read_from_the_metadata() -> None:
    requires = [
        "numpy>=1.26",
        "pytest>=8; extra == 'test'",
        'torch==2.13; extra == "models"',
        "triton; extra == 'models'",
        "matplotlib>=3; extra == 'charts'",
    ]
    installed = {"torch": "2.13", "matplotlib": "3.9"}
    found = by_subject(doctor.check_extras(requires, installed.get))
    assert list(found) == ["extra models", "extra charts"]
    assert found["extra models"].found == "torch 2.13, triton missing"
    assert found["extra models"].status == "note"
    assert found["extra models"].cure == "pip install 'block32[models]'"
    assert (found["extra charts"].status, found["extra charts"].cure) == ("ok", "")
    for target in ("models", "charts"):
        needed = by_subject(doctor.check_extras(requires, installed.get, needed=target))
        assert needed["extra models"].status == ("bad" if target == "models" else "note")
    (unknown,) = doctor.check_extras(None, installed.get)
    assert unknown.status == "note"


@pytest.mark.parametrize(
    ("version", "fits"), [("0.43.0", True), ("0.44.0", False), ("0.43", True), ("0.43.0+x", True)]
)
def test_an_extra_with_another_version_of_a_package(version: str, fits: bool) -> None:
    """llvmlite after 0.43 writes bitcode that Apple's loader does not read."""
    requires = ["llvmlite==0.43.0; extra == 'apple'", "flatbuffers>=24; extra == 'apple'"]
    installed = {"llvmlite": version, "flatbuffers": "25.1"}
    (finding,) = doctor.check_extras(requires, installed.get, needed="apple")
    assert finding.status == ("ok" if fits else "bad")
    assert ("(needs ==0.43.0)" in finding.found) != fits


def test_a_module_for_this_machine_fits() -> None:
    found = by_subject(doctor.check_module(read_vmfb(compiled(ONE, GFX950)), MI350))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "rocm-hsaco-fb: executables: 1, " in found["its code"].found
    assert "runs with --device=hip" in found["its code"].found


def test_a_module_for_another_machine_says_what_it_needs_and_what_would_work() -> None:
    """The wrong target: it "needs gfx950", and what would work."""
    found = by_subject(doctor.check_module(read_vmfb(compiled(ONE, GFX950)), PC))["its code"]
    assert found.status == "bad"
    assert "needs gfx950 (AMD MI350)" in found.found
    assert "--device=hip on a machine with gfx950" in found.cure
    assert "block32 compile --target=cpu" in found.cure


@pytest.mark.parametrize("hal", [6, 8])
def test_a_module_of_another_version_says_both(hal: int) -> None:
    """A vmfb on another version of the runtime, older or newer."""
    contents = read_vmfb(with_hal_version(compiled(ONE), hal))
    found = by_subject(doctor.check_module(contents, PC))["its IREE version"]
    assert found.status == "bad"
    assert f"compiled for hal version {hal}" in found.found
    assert found.cure == "compile the model again with iree-base-compiler==3.13.0"


def archive(path: Path, name: str) -> Path:
    content = np.arange(4, dtype=np.float32).tobytes()
    with path.open("wb") as stream:
        write_archive(stream, [NewEntry(name, len(content), lambda: iter([content]))])
    return path


@pytest.mark.parametrize(
    ("scope", "name", "status", "found"),
    [
        ("", "", "note", "are in files of their own"),
        ("model", "w", "ok", "all are in "),
        ("model", "other", "bad", "cannot start the module"),
        ("other", "w", "bad", "cannot start the module"),
        ("model", None, "bad", "cannot read the parameters"),
    ],
)
def test_parameters_are_looked_for_in_the_files(
    scope: str, name: str | None, status: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(PARAMETERS))
    files: dict[str, str] = {}
    if scope:
        file = tmp_path / "m.irpa"
        files[scope] = str(archive(file, name) if name else file)
    (finding,) = doctor.check_parameters(str(path), read_vmfb(path), files)
    assert finding.status == status
    assert found in finding.found
    assert bool(finding.cure) == (status != "ok")


def test_parameters_for_a_module_without_any(tmp_path: Path) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE))
    (finding,) = doctor.check_parameters(str(path), read_vmfb(path), {"model": "m.irpa"})
    assert (finding.status, finding.cure) == ("note", "leave out --parameters")
    assert doctor.check_parameters(str(path), read_vmfb(path), {}) == []


@pytest.mark.parametrize(
    ("options", "status", "found", "cure"),
    [
        (CompileOptions("gfx950"), "ok", "target gfx950: --iree-hal-target-device=hip", ""),
        (CompileOptions("gfx950", "znver4"), "bad", "--cpu=znver4 names a CPU", "leave out --cpu"),
        (
            CompileOptions("cpu", "znver4", ("--iree-llvmcpu-target-cpu=host",)),
            "bad",
            "both name the CPU",
            "leave one of them out",
        ),
        (
            CompileOptions("cpu", None, ("--iree-hal-target-device=hip",)),
            "bad",
            "--target=cpu is for llvm-cpu but the flags for devices ask for hip",
            "without --target",
        ),
        (CompileOptions("cpu", "z80"), "bad", "unknown CPU 'z80'", ""),
        (CompileOptions("cpu", None, ("--no-such-flag",)), "bad", "no-such-flag", ""),
    ],
)
def test_flags_are_checked_as_a_compile_would(
    options: CompileOptions, status: str, found: str, cure: str
) -> None:
    finding, *_ = doctor.check_flags(options)
    assert (finding.subject, finding.status) == ("flags", status)
    assert found in finding.found
    assert finding.cure.startswith(cure)


def test_flags_say_which_kernels_another_cpu_gets() -> None:
    _, kernels = doctor.check_flags(CompileOptions("cpu", "x86-64-v3"))
    assert kernels.found.startswith("avx2, generic (")
    assert doctor.check_flags(CompileOptions()) == []


@pytest.mark.parametrize(
    ("output", "status"), [("IREE compiler version 3.13.0rc1 @ 1", "ok"), ("3.9", "note")]
)
def test_the_compiler_that_a_shell_finds(
    output: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec is used with it, and has to be of its version."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    (finding,) = doctor.check_path("3.13.0", lambda _command: output)
    assert finding.status == status
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_path("3.13.0", lambda _command: output) == []


def test_packages_by_old_names_are_bad() -> None:
    assert doctor.check_old_packages({}.get) == []
    (finding,) = doctor.check_old_packages({"iree-runtime": "20240410.859"}.get)
    assert finding.status == "bad"
    assert "pip uninstall iree-runtime" in finding.cure


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        (
            ("--iree-hal-target-device=hip", "--iree-rocm-target=gfx950"),
            Requirement("rocm-hsaco-fb", "gfx950"),
        ),
        (
            ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_89"),
            Requirement("cuda-nvptx-fb", "sm_89"),
        ),
        (("--iree-hal-target-device=metal",), Requirement("metal-msl-fb")),
        (("--iree-hal-target-device=local",), None),
        ((), None),
    ],
)
def test_a_target_needs_what_its_flags_name(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], needs: Requirement | None
) -> None:
    class FakeTarget:
        def compile_flags(self) -> tuple[str, ...]:
            return flags

    monkeypatch.setattr(doctor, "target_named", lambda _name: FakeTarget())
    assert doctor.target_requirement("some") == needs


def test_targets_that_this_machine_cannot_run_are_bad() -> None:
    needs = Requirement("rocm-hsaco-fb", "gfx950")
    (here,), (there,) = (doctor.check_target("gfx950", needs, m) for m in (PC, MI350))
    assert (here.status, there.status) == ("bad", "ok")
    assert "needs gfx950" in here.found
    assert doctor.check_target("portable", None, PC)[0].status == "ok"


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="unknown target 'gfx999'; expected one of"):
        run("--target=gfx999")


def test_kernel_forms_follow_the_features() -> None:
    (none,) = doctor.kernel_forms(DeviceFacts(frozenset(), "x86_64"))
    assert none.found.startswith("generic (")
    assert "avx2 needs" in none.found
    (avx2,) = doctor.kernel_forms(DeviceFacts(frozenset({"avx2", "fma", "f16c"}), "x86_64"))
    assert avx2.found.startswith("avx2, generic (")


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(*arguments, "--json")
    return code, {item["subject"]: item for item in json.loads(capsys.readouterr().out)}


def test_the_whole_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE))
    code, found = report(capsys, str(path), "--target=portable")
    assert code == 0
    assert found["IREE compiler"]["found"] == found["IREE runtime"]["found"]
    assert found["CPU"]["status"] == "ok"
    assert found["device local-task"]["status"] == "ok"
    assert found["its IREE version"]["status"] == "ok"
    assert found["target portable"]["status"] == "ok"


def test_a_module_of_another_version_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(with_hal_version(compiled(ONE), 6))
    assert run(str(path)) == 1
    out = capsys.readouterr().out
    assert "compiled for hal version 6" in " ".join(out.replace("│", " ").split())


def test_refuses_files_that_are_no_module(tmp_path: Path) -> None:
    path = tmp_path / "m.vmfb"
    path.write_bytes(b"")
    with pytest.raises(VmfbError, match="the file is empty"):
        run(str(path))


def test_flags_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys, "--target=cpu", "--cpu=host", "--iree-llvmcpu-target-cpu=host")
    assert code == 1
    assert found["flags"]["status"] == "bad"
    with pytest.raises(DiagnosticError, match=r"one vmfb at most but also got b\.vmfb"):
        run("a.vmfb", "b.vmfb")
    with pytest.raises(DiagnosticError, match="expected a vmfb to check with --parameters"):
        run("--parameters=model=m.irpa")
