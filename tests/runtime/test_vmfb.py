# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The vmfb reader: it finds what the compiler wrote, and survives every damaged file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from block32.runtime.errors import LoadError, VmfbError
from block32.runtime.vmfb import read_vmfb
from tests.modules import CPU, GFX950, HOST, ONE, PARAMETERS, compiled

CUDA = ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_89")
METAL = ("--iree-hal-target-device=metal",)
VULKAN = ("--iree-hal-target-device=vulkan",)
VMVX = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx")
ARM = (*CPU, "--iree-llvmcpu-target-triple=aarch64-linux-gnu")
SYSTEM = (*HOST, "--iree-llvmcpu-link-embedded=false")


@pytest.mark.parametrize(
    ("flags", "form", "chip"),
    [
        (GFX950, "rocm-hsaco-fb", "gfx950"),
        (CUDA, "cuda-nvptx-fb", "sm_89"),
        (METAL, "metal-msl-fb", ""),
        (VULKAN, "vulkan-spirv-fb", ""),
        (VMVX, "vmvx-bytecode-fb", ""),
        (ARM, "embedded-elf-arm_64", ""),
    ],
)
def test_finds_the_executables_that_the_archive_holds(
    flags: tuple[str, ...], form: str, chip: str
) -> None:
    vmfb = compiled(ONE, flags)
    contents = read_vmfb(vmfb)
    assert [(e.format, e.chip) for e in contents.executables] == [(form, chip)]
    # The compiler also writes each executable as an entry of the zip: another road to the bytes.
    archive = zipfile.ZipFile(io.BytesIO(vmfb))
    assert archive.read(archive.namelist()[1]) == bytes(contents.executables[0].data)


def test_tells_system_libraries_from_embedded_ones() -> None:
    (executable,) = read_vmfb(compiled(ONE, SYSTEM)).executables
    assert executable.format.startswith("system-elf-")


def test_reads_exports_dependencies_and_targets() -> None:
    contents = read_vmfb(compiled())
    assert contents.dependencies == {"hal": 7}
    assert [name for name, text in contents.declarations.items() if text] == [
        "main",
        "scale",
        "twice",
    ]
    assert contents.declarations["twice"] == (
        "sync func @twice(%input0: tensor<?x8xbf16>, %input1: tensor<8xi8>) "
        "-> (%output0: tensor<?x8xbf16>)"
    )
    assert {target.backend for target in contents.targets} == {"llvm-cpu"}
    assert "io_parameters" in read_vmfb(compiled(PARAMETERS)).dependencies


def test_reads_the_cpu_features_that_the_code_needs() -> None:
    (target,) = read_vmfb(compiled(ONE, (*CPU, "--iree-llvmcpu-target-cpu=znver4"))).targets
    assert target.chip == "znver4"
    assert {"avx512bf16", "sse4a"} <= target.cpu_features
    assert "amx-bf16" not in target.cpu_features


def test_reads_a_module_without_a_zip_around_it(tmp_path: Path) -> None:
    flags = (*HOST, "--iree-vm-emit-polyglot-zip=false")
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(ONE, flags))
    contents, zipped = read_vmfb(path), read_vmfb(compiled(ONE))
    assert contents.source == str(path)
    assert [bytes(e.data) for e in contents.executables] == [
        bytes(e.data) for e in zipped.executables
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04", "cut off in its zip header"),
        (b"func.func @main() { return }", "got MLIR text; compile it with 'block32 compile'"),
        (b"ML\xefR" + bytes(60), "got MLIR bytecode"),
        (b"\x7fELF" + bytes(60), "got an ELF file"),
        (b"\x00\x01\x02\x03" + bytes(60), "got bytes that start with 00 01 02 03"),
    ],
)
def test_says_what_a_foreign_file_is(content: bytes, message: str) -> None:
    with pytest.raises(VmfbError, match=message.replace("(", "\\(")):
        read_vmfb(content)


def test_refuses_other_zip_archives() -> None:
    for method, message in (
        (zipfile.ZIP_STORED, "another zip archive"),
        (zipfile.ZIP_DEFLATED, "compressed zip"),
    ):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as archive:
            archive.writestr("a.txt", "text " * 100)
        with pytest.raises(VmfbError, match=message):
            read_vmfb(stream.getvalue())


@pytest.mark.parametrize("path", ["missing.vmfb", "."])
def test_says_why_a_file_cannot_be_read(tmp_path: Path, path: str) -> None:
    with pytest.raises(LoadError, match=r"cannot read the module: (no such file|is a directory)"):
        read_vmfb(tmp_path / path)


@pytest.mark.parametrize("flags", [HOST, (*HOST, "--iree-vm-emit-polyglot-zip=false")])
def test_every_truncation_is_an_error(flags: tuple[str, ...]) -> None:
    vmfb = compiled(ONE, flags)
    end = (
        len(vmfb)
        if flags == HOST
        else max(e.offset + len(e.data) for e in read_vmfb(vmfb).executables)
    )
    for size in {*range(0, 200), *range(0, end, 97), end - 1}:
        with pytest.raises(VmfbError, match=r"cut off|empty|expected an IREE module"):
            read_vmfb(vmfb[:size])


@given(st.data())
def test_damage_is_never_more_than_an_error(data: st.DataObject) -> None:
    vmfb = bytearray(compiled(ONE))
    header = st.integers(0, 1500)
    for position in data.draw(st.lists(header, min_size=1, max_size=8)):
        vmfb[position] = data.draw(st.integers(0, 255))
    try:
        contents = read_vmfb(vmfb)
    except VmfbError:
        return
    assert all(len(e.data) <= len(vmfb) for e in contents.executables)
