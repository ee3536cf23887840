# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the weight of a matmul comes from, in which order its bytes are, and who else reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from iree.compiler import ir

from block32.dialects import layout as layout_attribute
from block32.dialects.diagnostics import error_at
from block32.dialects.kernel import ATTRIBUTE as KERNEL_ATTRIBUTE
from block32.dialects.kernel import KernelConfig
from block32.lowering.common.weight_layout import PLAIN
from block32.passes import canonical
from block32.passes.canonical import CanonicalMatmul
from block32.passes.constants import is_constant
from block32.passes.symbols import LOAD_NAME, global_of, symbol_of, value_of_global
from block32.passes.walk import operations_named, producer

#: Ops whose result has the bytes of their operand in the same order.
_BITCASTS: Final = ("flow.tensor.bitcast", "tensor.bitcast", "tensor.cast")
#: Ops that IREE evaluates where their first operand is a constant.
_VIEWS: Final = (*_BITCASTS, "linalg.transpose", "tensor.expand_shape", "tensor.collapse_shape")


@dataclass(frozen=True)
class Source:
    """The constant, or the global, that a value is made of.

    Attributes:
        op: The ``arith.constant``, or the definition of the global.
        is_parameter: Its value is in a parameter file, and known only when a program is loaded.
    """

    op: ir.Operation
    is_parameter: bool


def rhs_position(matmul: CanonicalMatmul) -> int:
    """Which operand of the op is the weight."""
    if matmul.op.name == canonical.OP_NAME:
        return 2
    return matmul.problem.argument_names.index("rhs")


def weight_of(matmul: CanonicalMatmul) -> ir.Value:
    """The weight of a matmul."""
    return matmul.op.operands[rhs_position(matmul)]


def constant_behind(value: ir.Value, symbols: ir.SymbolTable) -> ir.Attribute | None:
    """The constant in the module whose bytes a value has, in the same order."""
    op = producer(value)
    while op is not None and op.name in _BITCASTS:
        op = producer(op.operands[0])
    if op is None or op.name not in ("arith.constant", LOAD_NAME):
        return None
    source = source_of(op.results[0], symbols)
    if source is None or source.is_parameter:
        return None
    name = "value" if source.op.name == "arith.constant" else "initial_value"
    return source.op.attributes[name]


def source_of(value: ir.Value, symbols: ir.SymbolTable) -> Source | None:
    """What a weight is made of by views alone; None where it is known only at run time."""
    op = producer(value)
    while op is not None and op.name in _VIEWS:
        op = producer(op.operands[0])
    if op is None:
        return None
    if op.name == "arith.constant":
        return Source(op, is_parameter=False)
    if op.name != LOAD_NAME:
        return None
    definition = symbols[global_of(op)].operation
    value = value_of_global(definition)
    return None if value is None else Source(definition, is_parameter=not is_constant(value))


def stored_layout(value: ir.Value, symbols: ir.SymbolTable) -> str:
    """The order in which the bytes of a value are.

    Raises:
        DiagnosticError: The attribute of a global is malformed.
    """
    op = producer(value)
    while op is not None:
        if layout_attribute.ATTRIBUTE in op.attributes:
            return layout_attribute.parse(op.attributes[layout_attribute.ATTRIBUTE])
        if op.name == LOAD_NAME:
            return layout_attribute.of_global(symbols[global_of(op)])
        if op.name not in _BITCASTS:
            break
        op = producer(op.operands[0])
    return PLAIN


def layout_read_by(matmul: CanonicalMatmul) -> str:
    """The order in which a matmul's kernel reads its weight; portable code reads the plain one.

    Raises:
        DiagnosticError: Its tiers read different ones.
    """
    if KERNEL_ATTRIBUTE not in matmul.op.attributes:
        return PLAIN
    config = KernelConfig.parse(matmul.op.attributes[KERNEL_ATTRIBUTE])
    names = sorted({tier.weight_layout for tier in config.tiers})
    if len(names) > 1:
        raise error_at(
            matmul.op,
            f"has tiers that read its weight as '{names[0]}' and as '{names[1]}'; expected one "
            "weight_layout",
        )
    return names[0]


def check_layout(matmul: CanonicalMatmul, symbols: ir.SymbolTable) -> None:
    """Refuse a matmul whose kernel would take the bytes of its weight for others.

    Raises:
        DiagnosticError: What the weight has, and what the kernel reads.
    """
    stored = stored_layout(weight_of(matmul), symbols)
    read = layout_read_by(matmul)
    if stored != read:
        raise error_at(
            matmul.op, f"reads its weight in the layout '{read}', but it is stored as '{stored}'"
        )


def readers_of(
    source: ir.Operation, module: ir.Module, *, only_bitcasts: bool
) -> list[ir.OpOperand]:
    """The uses at the end of all views of a constant or a global, or of its bitcasts alone."""
    views = _BITCASTS if only_bitcasts else _VIEWS
    if source.name == "arith.constant":
        return _uses(source.results[0], views)
    return [
        use
        for load in operations_named(module, LOAD_NAME)
        if global_of(load) == symbol_of(source)
        for use in _uses(load.results[0], views)
    ]


def _uses(value: ir.Value, views: tuple[str, ...]) -> list[ir.OpOperand]:
    found: list[ir.OpOperand] = []
    for use in value.uses:
        op = use.owner.operation
        if op.name in views and use.operand_number == 0:
            found += _uses(op.results[0], views)
        else:
            found.append(use)
    return found
