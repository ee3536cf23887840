# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32 doctor``: each finding on made-up machines, and the command as a whole on this one."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.target import DeviceFacts
from block32.runtime.errors import VmfbError
from block32.runtime.fit import Requirement
from block32.runtime.machine import Device, Machine
from block32.runtime.vmfb import read_vmfb
from block32.tools import doctor
from tests.modules import GFX950, ONE, PARAMETERS, compiled, with_hal_version

PC = Machine("x86_64", "Linux", {}, (Device("local-task", ("default",)),), 7, "3.13.0")
MI350 = replace(PC, devices=(Device("hip", ("AMD Instinct MI355X",), chips=("gfx950",)),))


def by_subject(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in findings}


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    options = parser.parse_args(["doctor", *arguments])
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
    (unknown,) = doctor.check_extras(None, installed.get)
    assert unknown.status == "note"


def test_a_module_for_this_machine_fits() -> None:
    found = by_subject(doctor.check_module(read_vmfb(compiled(ONE, GFX950)), MI350))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "rocm-hsaco-fb: executables: 1, " in found["its code"].found
    assert "runs with --device=hip" in found["its code"].found


def test_a_module_for_another_machine_says_what_it_needs_and_what_would_work() -> None:
    found = by_subject(doctor.check_module(read_vmfb(compiled(ONE, GFX950)), PC))["its code"]
    assert found.status == "bad"
    assert "needs gfx950 (AMD MI350)" in found.found
    assert "--device=hip on a machine with gfx950" in found.cure
    assert "block32 compile --target=cpu" in found.cure


@pytest.mark.parametrize("hal", [6, 8])
def test_a_module_of_another_version_says_both(hal: int) -> None:
    contents = read_vmfb(with_hal_version(compiled(ONE), hal))
    found = by_subject(doctor.check_module(contents, PC))["its IREE version"]
    assert found.status == "bad"
    assert f"compiled for hal version {hal}" in found.found
    assert found.cure == "compile the model again with iree-base-compiler==3.13.0"


def test_parameters_are_a_note() -> None:
    contents = read_vmfb(compiled(PARAMETERS))
    assert by_subject(doctor.check_module(contents, PC))["its parameters"].status == "note"


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


def test_exits_with_1_when_the_module_does_not_fit(
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
