# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel's body can ask for: its bindings, M, and its workgroup id."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.common.index import Index, IndexValue, as_value, constant
from block32.lowering.problem import ScaledMatmul

#: Bytes that every binding is aligned to.
ALIGNMENT: Final = 64


@dataclass(frozen=True)
class Start:
    """A place in a binding, ``count`` times ``unit`` bytes from its beginning."""

    count: Index
    unit: int

    @property
    def alignment(self) -> int:
        """Bytes that the place is aligned to for every count."""
        return gcd(self.unit, ALIGNMENT)


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

    def memref(
        self,
        name: str,
        type_text: str,
        dynamic_sizes: tuple[Index, ...] = (),
        start: Start | None = None,
    ) -> ir.Value:
        """The binding ``name`` seen as a memref of the given type.

        Args:
            name: A name of the launch's bindings.
            type_text: An MLIR memref type, such as ``memref<?x4096xi8>``. Any element type may be
                laid over the bytes.
            dynamic_sizes: A value for each ``?``.
            start: Where in the binding the memref begins; at its first byte by default.
        """
        start = start or Start(0, ALIGNMENT)
        sizes = [constant(d) if isinstance(d, int) else d.value for d in dynamic_sizes]
        subspan = ir.Operation.create(
            "hal.interface.binding.subspan",
            results=[ir.Type.parse(type_text)],
            operands=[as_value(start.count * start.unit), *sizes],
            attributes={
                "layout": self.layout,
                "binding": ir.IntegerAttr.get(ir.IndexType.get(), self._bindings.index(name)),
                "alignment": ir.IntegerAttr.get(ir.IndexType.get(), start.alignment),
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


class KernelView(KernelContext):
    """A part of a launch, for a kernel that knows nothing of the whole.

    Bindings may begin further on, and the kernel may be told another problem, another M and another
    place among the workgroups.
    """

    def __init__(
        self,
        whole: KernelContext,
        problem: ScaledMatmul,
        m: Index,
        *,
        workgroup: tuple[IndexValue, ...] | None = None,
        starts: Mapping[str, Start] | None = None,
    ):
        """See the class.

        Args:
            whole: The launch, or a view of it.
            problem: What the kernel computes.
            m: Its rows.
            workgroup: Its position along each dimension that it asks for; the whole's by default.
            starts: Where bindings begin, by name; no view of a view moves one twice.
        """
        self.problem = problem
        self.layout = whole.layout
        self.m = m
        self._whole = whole
        self._workgroup = workgroup
        self._starts = starts or {}

    def has(self, name: str) -> bool:
        """Whether the launch has a binding of this name."""
        return self._whole.has(name)

    def renamed(self, names: Mapping[str, str]) -> KernelContext:
        """The same part, with bindings under other names: ``names`` has new ones by old ones."""
        other = copy.copy(self)
        other._whole = self._whole.renamed(names)
        other._starts = {names.get(name, name): start for name, start in self._starts.items()}
        return other

    def memref(
        self,
        name: str,
        type_text: str,
        dynamic_sizes: tuple[Index, ...] = (),
        start: Start | None = None,
    ) -> ir.Value:
        """The binding ``name``, from where its part begins."""
        assert start is None or name not in self._starts, f"'{name}' is moved twice"
        return self._whole.memref(name, type_text, dynamic_sizes, start or self._starts.get(name))

    def workgroup_id(self, dimension: int = 0) -> IndexValue:
        """The position that the kernel is told."""
        if self._workgroup is None:
            return self._whole.workgroup_id(dimension)
        return self._workgroup[dimension]

    def workgroup_count(self, dimension: int = 0) -> IndexValue:
        """The number of workgroups of the whole launch."""
        return self._whole.workgroup_count(dimension)
