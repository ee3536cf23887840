# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel's body can ask for: its bindings, M, and its workgroup id."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.index import Index, IndexValue, constant
from block32.lowering.problem import ScaledMatmul


class KernelContext:
    """The view that a kernel's body has of its launch, at the current insertion point.

    Attributes:
        problem: The matmul.
        m: Rows: an integer, or the push constant when they are known only at run time.
        layout: The ``#hal.pipeline.layout`` of the kernel.
    """

    def __init__(self, problem: ScaledMatmul, layout: ir.Attribute, bindings: tuple[str, ...]):
        """``bindings`` are the launch's names in binding order."""
        self.problem = problem
        self.layout = layout
        self._bindings = bindings
        self.m: Index = problem.m if problem.m is not None else self._load_m()

    def _load_m(self) -> IndexValue:
        """M travels as the only push constant, an i32."""
        i32 = ir.IntegerType.get_signless(32)
        loaded = ir.Operation.create(
            "hal.interface.constant.load",
            results=[i32],
            attributes={
                "layout": self.layout,
                "ordinal": ir.IntegerAttr.get(ir.IndexType.get(), 0),
            },
        )
        return IndexValue(arith.index_castui(ir.IndexType.get(), loaded.result))

    def has(self, name: str) -> bool:
        """Whether the launch has a binding of this name."""
        return name in self._bindings

    def renamed(self, names: Mapping[str, str]) -> KernelContext:
        """The same launch, with bindings under other names: ``names`` has new ones by old ones."""
        other = copy.copy(self)
        other._bindings = tuple(names.get(binding, binding) for binding in self._bindings)
        return other

    def memref(self, name: str, type_text: str, dynamic_sizes: tuple[Index, ...] = ()) -> ir.Value:
        """The binding ``name`` seen as a memref of the given type.

        Args:
            name: A name of the launch's bindings.
            type_text: An MLIR memref type, such as ``memref<?x4096xi8>``. Any element type may be
                laid over the bytes.
            dynamic_sizes: A value for each ``?``.
        """
        sizes = [constant(d) if isinstance(d, int) else d.value for d in dynamic_sizes]
        subspan = ir.Operation.create(
            "hal.interface.binding.subspan",
            results=[ir.Type.parse(type_text)],
            operands=[constant(0), *sizes],
            attributes={
                "layout": self.layout,
                "binding": ir.IntegerAttr.get(ir.IndexType.get(), self._bindings.index(name)),
                "alignment": ir.IntegerAttr.get(ir.IndexType.get(), 64),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, len(sizes)]),
            },
        )
        return subspan.result

    def workgroup_id(self, dimension: int = 0) -> IndexValue:
        """The workgroup's position along x (0), y (1) or z (2)."""
        return self._interface_index("hal.interface.workgroup.id", dimension)

    def workgroup_count(self, dimension: int = 0) -> IndexValue:
        """The number of workgroups along x (0), y (1) or z (2)."""
        return self._interface_index("hal.interface.workgroup.count", dimension)

    def _interface_index(self, op_name: str, dimension: int) -> IndexValue:
        op = ir.Operation.create(
            op_name,
            results=[ir.IndexType.get()],
            attributes={"dimension": ir.IntegerAttr.get(ir.IndexType.get(), dimension)},
        )
        return IndexValue(op.result)


#: A function that writes a kernel's body.
KernelBody = Callable[[KernelContext], Any]
