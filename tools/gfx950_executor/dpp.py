# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Data-parallel primitives: which lane a DPP operand comes from.

All lanes read the register as it was before the instruction, whatever its target.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from block32.tools.gfx950_executor.errors import UnknownInstructionError
from block32.tools.gfx950_executor.state import LANES

Index = npt.NDArray[np.int64]
_LANE = np.arange(LANES)
_ROW = _LANE // 16 * 16
_IN_ROW = _LANE % 16
NONE = -1


def source_lanes(control: int) -> Index:
    """The lane that each lane reads under a 9-bit dpp_ctrl; -1 where there is none.

    Raises:
        UnknownInstructionError: A reserved control value.
    """
    if control <= 0xFF:
        pattern = np.array([control >> 2 * i & 3 for i in range(4)])
        return _LANE // 4 * 4 + pattern[_LANE % 4]
    amount = control & 0xF
    if 0x101 <= control <= 0x10F:  # row_shl: from a higher lane
        return np.where(_IN_ROW + amount < 16, _LANE + amount, NONE)
    if 0x111 <= control <= 0x11F:  # row_shr
        return np.where(amount <= _IN_ROW, _LANE - amount, NONE)
    if 0x121 <= control <= 0x12F:  # row_ror
        return _ROW + (_IN_ROW - amount) % 16
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return _ROW + amount
    special = {
        0x130: np.where(_LANE < 63, _LANE + 1, NONE),  # wave_shl:1
        0x134: (_LANE + 1) % 64,  # wave_rol:1
        0x138: np.where(_LANE > 0, _LANE - 1, NONE),  # wave_shr:1
        0x13C: (_LANE - 1) % 64,  # wave_ror:1
        0x140: _ROW + 15 - _IN_ROW,  # row_mirror
        0x141: _LANE // 8 * 8 + 7 - _LANE % 8,  # row_half_mirror
        0x142: np.where(_LANE >= 16, _ROW - 1, NONE),  # row_bcast:15
        0x143: np.where(_LANE >= 32, 31, NONE),  # row_bcast:31
    }
    if control not in special:
        raise UnknownInstructionError(f"dpp_ctrl {control:#x}")
    return special[control]


def enabled_lanes(row_mask: int, bank_mask: int) -> npt.NDArray[np.bool_]:
    """Lanes that the row and bank masks let write."""
    rows = row_mask >> (_LANE // 16) & 1
    banks = bank_mask >> (_IN_ROW // 4) & 1
    return (rows & banks).astype(np.bool_)
