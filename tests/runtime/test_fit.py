# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which machines run which modules, on machines that are made up here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from block32.runtime.fit import Requirement, requirements, version_problem, what_would_work
from block32.runtime.machine import Device, Machine, amd_chips, runtime_reason, this_machine
from block32.runtime.vmfb import read_vmfb
from tests.modules import CPU, GFX950, ONE, compiled, with_hal_version

NOTHING = Machine("x86_64", "Linux", {"avx2": True, "avx512f": False}, (), 7, "3.13.0")


def with_gpus(driver: str, *chips: str) -> Machine:
    return replace(NOTHING, devices=(Device(driver, ("a GPU",), chips=chips),))


@pytest.mark.parametrize(
    ("need", "machine"),
    [
        (Requirement("rocm-hsaco-fb", "gfx950"), with_gpus("hip", "gfx942", "gfx950")),
        (Requirement("cuda-nvptx-fb", "sm_89"), with_gpus("cuda", "sm_89")),
        (Requirement("cuda-nvptx-fb", "sm_89"), with_gpus("cuda", "sm_90")),  # PTX runs on later
        (Requirement("cuda-nvptx-fb", "sm_89"), with_gpus("cuda")),  # chip unknown: no objection
        (Requirement("metal-msl-fb"), with_gpus("metal")),
        (Requirement("vmvx-bytecode-fb"), replace(NOTHING, architecture="riscv_64")),
        (Requirement("embedded-elf-x86_64", "", frozenset({"avx2"})), NOTHING),
        (Requirement("embedded-elf-x86_64", "", frozenset({"avx-unheard-of"})), NOTHING),
    ],
)
def test_what_runs(need: Requirement, machine: Machine) -> None:
    assert need.why_not(machine) is None


@pytest.mark.parametrize(
    ("need", "machine", "reason"),
    [
        (Requirement("rocm-hsaco-fb", "gfx950"), NOTHING, "needs gfx950 (AMD MI350); device hip: "),
        (
            Requirement("rocm-hsaco-fb", "gfx950"),
            with_gpus("hip", "gfx942"),
            "needs gfx950 (AMD MI350); this machine has gfx942",
        ),
        (
            Requirement("cuda-nvptx-fb", "sm_89"),
            with_gpus("cuda", "sm_80"),
            "needs sm_89 (NVIDIA L40, RTX 40 or later); this machine has sm_80",
        ),
        (Requirement("metal-msl-fb"), NOTHING, "needs a metal device; device metal: "),
        (
            Requirement("embedded-elf-arm_64"),
            NOTHING,
            "needs an arm_64 CPU; this one is x86_64",
        ),
        (
            Requirement("embedded-elf-x86_64", "", frozenset({"avx2", "avx512f"})),
            NOTHING,
            "needs the CPU features avx512f, which this CPU lacks",
        ),
    ],
)
def test_what_does_not_run(need: Requirement, machine: Machine, reason: str) -> None:
    found = need.why_not(machine)
    assert found is not None
    assert found.startswith(reason)


def test_cures_name_what_would_work() -> None:
    gpu, arm = Requirement("rocm-hsaco-fb", "gfx950"), Requirement("embedded-elf-arm_64")
    here = "compile the model for this machine with 'block32 compile --target=cpu'"
    assert what_would_work((gpu,), "x86_64") == (
        f"run it with --device=hip on a machine with gfx950 (AMD MI350), or {here}"
    )
    assert what_would_work((arm,), "x86_64") == f"run it on an arm_64 CPU, or {here}"
    assert what_would_work((arm,), "arm_64") == here


def test_requirements_come_from_the_module() -> None:
    (gpu,) = requirements(read_vmfb(compiled(ONE, GFX950)))
    assert gpu == Requirement("rocm-hsaco-fb", "gfx950")
    (cpu,) = requirements(read_vmfb(compiled(ONE, (*CPU, "--iree-llvmcpu-target-cpu=znver4"))))
    assert cpu.format == "embedded-elf-x86_64"
    assert "avx512bf16" in cpu.cpu_features


def test_versions_are_compared_both_ways() -> None:
    vmfb = compiled(ONE)
    assert version_problem(read_vmfb(vmfb), 7, "3.13.0") is None
    for hal, release in ((6, " (IREE 3.4 to 3.11)"), (8, "")):
        assert version_problem(read_vmfb(with_hal_version(vmfb, hal)), 7, "3.13.0") == (
            f"the module was compiled for hal version {hal}{release}; "
            "the runtime is IREE 3.13.0 with hal version 7"
        )


def test_a_module_that_makes_empty_results_fits() -> None:
    """What it imports was there in the first version."""
    vmfb = compiled(
        b"""
        func.func @f() -> tensor<0x3xf32> {
          %c = arith.constant dense<0.0> : tensor<0x3xf32>
          return %c : tensor<0x3xf32>
        }
        """
    )
    assert read_vmfb(vmfb).dependencies["hal"] == 0
    assert version_problem(read_vmfb(vmfb), 7, "3.13.0") is None


def test_amd_chips_are_read_as_the_kernel_spells_them(tmp_path: Path) -> None:
    for node, version in enumerate((0, 90500, 90010, 110001)):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"simd_count 1\ngfx_target_version {version}\n")
    assert amd_chips(tmp_path) == ("gfx950", "gfx90a", "gfx1101")
    assert amd_chips(tmp_path / "missing") == ()


def test_this_machine_has_its_own_cpu() -> None:
    machine = this_machine()
    assert machine.device("local-task").problem == ""
    assert machine.device("abacus").problem == "the runtime has no such driver"
    assert machine.hal_version == read_vmfb(compiled(ONE)).dependencies["hal"]


def test_runtime_errors_lose_their_source_positions() -> None:
    error = ValueError("Error creating driver: c/a.c:319: NOT_FOUND; no driver 'x' registered; y")
    assert runtime_reason(error) == "no driver 'x' registered"
    assert runtime_reason(ValueError("plain text")) == "plain text"
