# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The optional packages: which extra asks for which, and whether what is installed will do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

#: Extras that are for working on block32 itself.
_OWN_EXTRAS = ("test", "lint")


@dataclass(frozen=True)
class Package:
    """A package that an extra asks for.

    Attributes:
        extra: The extra.
        name: The package.
        wanted: Its versions: ``==0.43.0``, ``>=24``, or empty.
        installed: The version that is here, or None.
    """

    extra: str
    name: str
    wanted: str
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether it is installed in a version that is asked for."""
        if self.installed is None:
            return False
        have = _numbers(self.installed)
        for operator, version in re.findall(r"(==|>=|<)\s*([\d.]+)", self.wanted):
            want = _numbers(version)
            length = max(len(have), len(want))
            left, right = (v + (0,) * (length - len(v)) for v in (have, want))
            holds = {"==": left == right, ">=": left >= right, "<": left < right}[operator]
            if not holds:
                return False
        return True

    def describe(self) -> str:
        """The package, its version, and the one to have where it is another."""
        if self.installed is None or self.fits:
            return f"{self.name} {self.installed or 'missing'}"
        return f"{self.name} {self.installed} (needs {self.wanted})"


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def installed_version(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements_of_block32() -> list[str] | None:
    """The requirements in block32's own metadata, None where it is not installed."""
    try:
        return metadata.requires("block32") or []
    except metadata.PackageNotFoundError:
        return None


def packages_by_extra(
    requires: Iterable[str], installed: Callable[[str], str | None]
) -> dict[str, list[Package]]:
    """What each extra asks for.

    Args:
        requires: Requirements as package metadata has them.
        installed: The version of a package, or None.
    """
    found: dict[str, list[Package]] = {}
    for requirement in requires:
        match = re.match(r"([\w.-]+)\s*([^;]*)", requirement)
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", requirement)
        if match and extra and extra[1] not in _OWN_EXTRAS:
            name, wanted = match[1], match[2].strip(" ()")
            package = Package(extra[1], name, wanted, installed(name))
            found.setdefault(extra[1], []).append(package)
    return found
