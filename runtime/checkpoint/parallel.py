# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensor parallelism: which part of a weight one of several devices gets.

``rows`` splits N, so that each device has some of the result's columns. ``columns`` splits K, so
that the results of all devices have to be added; the bias is on the first device alone then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from block32.dialects.diagnostics import DiagnosticError
from block32.lowering.problem import BLOCK_K
from block32.runtime.checkpoint.layers import ScaledWeight

_FORM: Final = re.compile(
    r"(?:(?P<pattern>.+)=)?(?P<axis>rows|columns):(?P<rank>[0-9]{1,6})/(?P<world>[0-9]{1,6})"
)


@dataclass(frozen=True)
class Shard:
    """A part of some weights.

    Attributes:
        pattern: The names of the layers, with ``*`` and ``?``.
        axis: ``rows`` or ``columns``.
        rank: Which part, from 0.
        world: Of how many.
    """

    pattern: str
    axis: str
    rank: int
    world: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``[PATTERN=]rows:RANK/WORLD`` or the same with ``columns``.

        Raises:
            DiagnosticError: It is of another form, or the rank is not below the world's size.
        """
        match = _FORM.fullmatch(text)
        if not match or not int(match["rank"]) < int(match["world"]):
            raise DiagnosticError(
                f"--shard={text}",
                "expected [PATTERN=]rows:RANK/WORLD or columns:RANK/WORLD with RANK from 0 to "
                "WORLD - 1",
            )
        pattern = match["pattern"] or "*"
        return cls(pattern, match["axis"], int(match["rank"]), int(match["world"]))

    def takes(self, weight: ScaledWeight) -> bool:
        """Whether it is about a weight."""
        return fnmatchcase(weight.layer, self.pattern)

    def describe(self) -> str:
        """The part as reports show it, such as ``rows 0 of 8``."""
        return f"{self.axis} {self.rank} of {self.world}"

    def part(self, weight: ScaledWeight) -> tuple[range, range]:
        """The rows and the columns of a weight in the part.

        Raises:
            DiagnosticError: The weight does not divide into equal parts, of whole blocks along K.
        """
        rows, columns = range(weight.n), range(weight.k)
        if self.axis == "rows":
            return rows[_slice(weight, "N", weight.n, 1, self)], columns
        return rows, columns[_slice(weight, "K", weight.k, BLOCK_K, self)]

    @property
    def has_bias(self) -> bool:
        """Whether the part adds the bias."""
        return self.axis == "rows" or self.rank == 0


def _slice(weight: ScaledWeight, axis: str, size: int, unit: int, shard: Shard) -> slice:
    # The one part of a whole may end with a short block, as the whole does.
    if shard.world > 1 and size % (unit * shard.world):
        parts = f"{shard.world} equal parts" + (f" of whole blocks of {unit}" if unit > 1 else "")
        weight.refuse(f"{axis} = {size} of '{weight.name}' does not divide into {parts}")
    length = size // shard.world
    return slice(shard.rank * length, (shard.rank + 1) * length)
