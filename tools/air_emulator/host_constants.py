# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Constants of a module at phase hal: what its initializers put into globals, without running them.

An initializer makes a buffer from a ``util.buffer.constant`` and stores it in a global. Python has
no view of the composite that such an op holds, so its parts are read from its text.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
from iree.compiler import ir

from block32.tools.air_emulator.faults import UnsupportedError

_PART = re.compile(r"dense<.*?> : (?:tensor|vector)<[^>]*xi8>", re.DOTALL)


def of_initializer(initializer: ir.Operation) -> dict[str, npt.NDArray[np.uint8]]:
    """The bytes of each global of buffer type that ``util.initializer`` fills, by symbol.

    Raises:
        UnsupportedError: Its constants are not one buffer in one global, or not bytes.
    """
    constants: list[ir.Operation] = []
    symbols: list[str] = []
    for block in initializer.regions[0].blocks:
        for view in block.operations:
            op = view.operation
            if op.name == "util.buffer.constant":
                constants.append(op)
            elif op.name == "util.global.store" and str(op.operands[0].type) == "!hal.buffer":
                symbols.append(ir.FlatSymbolRefAttr(op.attributes["global"]).value)
    if not symbols:
        return {}
    if len(constants) != 1 or len(symbols) != 1:
        raise UnsupportedError("an initializer that fills other than one global from one constant")
    return {symbols[0]: _bytes_of(constants[0].attributes["value"])}


def _bytes_of(value: ir.Attribute) -> npt.NDArray[np.uint8]:
    parts = [ir.DenseIntElementsAttr(ir.Attribute.parse(p)) for p in _PART.findall(str(value))]
    data = b"".join(np.array(part, np.int8).tobytes() for part in parts)
    size = re.match(r"#util\.composite<(\d+)xi8", str(value))
    if size is not None and int(size[1]) != len(data):
        raise UnsupportedError("a constant with parts that are not i8")
    return np.frombuffer(data, np.uint8)
