# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""K panels that fill the spare rows of a matrix instruction when M is small.

With ``k_pack`` panels, packed row r is row ``r // k_pack`` on panel ``r % k_pack``. In a K step of
``block_k * k_pack`` elements panel p is the elements from ``p * block_k`` on. A product is wanted
where both sides are on one panel; the wanted ones are summed over the panels.
"""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.common.index import Index


@dataclass(frozen=True)
class Packing:
    """How rows and K panels share packed rows.

    Attributes:
        k_pack: Panels: 1, 2 or 4.
        block_k: K elements of one panel in one step.
    """

    k_pack: int
    block_k: int

    @property
    def step(self) -> int:
        """K elements that one step consumes over all panels."""
        return self.k_pack * self.block_k

    def row(self, packed_row: Index) -> Index:
        """The row of x or w that a packed row holds."""
        return packed_row // self.k_pack

    def panel(self, packed_row: Index) -> Index:
        """The panel that a packed row holds."""
        return packed_row % self.k_pack

    def panel_k(self, packed_row: Index) -> Index:
        """The first K of the packed row's panel, counted from the step's first."""
        return self.panel(packed_row) * self.block_k
