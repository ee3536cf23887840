# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A matmul and the consumers that become its epilogue."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from iree.compiler import ir
from iree.compiler.dialects import arith, tensor

from block32.lowering.common.index import constant
from block32.lowering.common.tensors import dynamic_sizes
from block32.lowering.composites import Composites
from block32.lowering.problem import RESULT_TYPES, Epilogue, ScaledMatmul
from block32.passes.canonical import CanonicalMatmul
from block32.passes.fusing.body import Step, is_silu, read_steps
from block32.passes.raising.contraction import Operand
from block32.passes.raising.views import through_views

_ORDER = ("row_scale", "scale", "bias", "residual", "activation")


@dataclass(frozen=True)
class _Extra:
    """An operand of the epilogue: a value of the program, or a constant."""

    operand: Operand | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Chain:
    """A matmul with an epilogue that is still made of ops of the program.

    Attributes:
        matmul: The matmul.
        problem: The matmul with the epilogue.
        value: The result of the last op that was taken in.
        extras: The epilogue's operands by name.
        taken: The consumers that were taken in, reshapes among them.
        is_cast: The last one rounded to a narrower type, so that nothing may come after it.
    """

    matmul: CanonicalMatmul
    problem: ScaledMatmul
    value: ir.Value
    extras: dict[str, _Extra] = field(default_factory=dict)
    taken: tuple[ir.Operation, ...] = ()
    is_cast: bool = False

    @classmethod
    def of(cls, matmul: CanonicalMatmul) -> Chain:
        """The matmul with the epilogue that it has already, and nothing else."""
        return cls(matmul, matmul.problem, matmul.op.results[0])

    def extended(self) -> Chain | None:
        """The chain with one more consumer; None where the next one is none of ours."""
        if self.is_cast or self.problem.grouping:
            return None
        users = _users(self.value)
        if len(users) == 2:
            return self._with_silu(users)
        if len(users) != 1:
            return None
        (user,) = users
        if user.name == "tensor.expand_shape" and not self.taken:
            reshaped = dataclasses.replace(self, value=user.results[0], taken=(user,))
            return reshaped.extended()
        if user.name != "linalg.generic" or not _is_elementwise(user):
            return None
        return self._with_consumer(user)

    def _with_consumer(self, consumer: ir.Operation) -> Chain | None:
        positions = [i for i, v in enumerate(consumer.operands) if v == self.value]
        maps = [
            ir.AffineMapAttr(m).value for m in ir.ArrayAttr(consumer.attributes["indexing_maps"])
        ]
        if len(positions) != 1 or maps[positions[0]] != maps[-1]:
            return None
        steps = read_steps(consumer, positions[0])
        if steps is None:
            return None
        element = str(ir.RankedTensorType(consumer.results[0].type).element_type)
        if element not in RESULT_TYPES or consumer.results[0].owner != consumer:
            return None
        chain: Chain | None = self
        for step in steps:
            operand = None
            if step.operand is not None:
                operand = Operand(consumer.operands[step.operand], maps[step.operand])
            chain = chain._with_step(step, operand)
            if chain is None:
                return None
        return dataclasses.replace(
            chain,
            problem=dataclasses.replace(chain.problem, result=element),
            value=consumer.results[0],
            taken=(*self.taken, consumer),
            is_cast=element != self.problem.result,
        )

    def _with_silu(self, users: list[ir.Operation]) -> Chain | None:
        """Two consumers, a sigmoid and the product with it, as importers write SiLU."""
        for sigmoid, product in (users, users[::-1]):
            if not all(op.name == "linalg.generic" and _is_elementwise(op) for op in users):
                return None
            if not is_silu(self.value, sigmoid, product):
                continue
            chain = self._with_field("activation", "silu", None)
            if chain is None:
                return None
            element = str(ir.RankedTensorType(product.results[0].type).element_type)
            return dataclasses.replace(
                chain,
                problem=dataclasses.replace(chain.problem, result=element),
                value=product.results[0],
                taken=(*self.taken, sigmoid, product),
            )
        return None

    def _with_step(self, step: Step, operand: Operand | None) -> Chain | None:
        extra = _Extra(factor=step.factor)
        if step.activation is not None:
            return self._with_field("activation", step.activation, None)
        if operand is None:
            return self._with_field("scale", True, extra)
        operand = through_views(operand)
        extra = _Extra(operand)
        dims = [e.position for e in operand.map.results if isinstance(e, ir.AffineDimExpr)]
        if len(dims) != len(operand.map.results):
            return None
        rank = ir.RankedTensorType(self.value.type).rank
        every, element = list(range(rank)), operand.element
        if step.kind == "add" and element in RESULT_TYPES:
            name = {(rank - 1,): "bias", tuple(every): "residual"}.get(tuple(dims))
            return self._with_field(name, element, extra) if name else None
        if step.kind == "multiply" and element == "f32":
            name = {(): "scale", tuple(every[:-1]): "row_scale"}.get(tuple(dims))
            return self._with_field(name, True, extra) if name else None
        return None

    def _with_field(self, name: str, value: object, extra: _Extra | None) -> Chain | None:
        """Set a field of the epilogue, unless it or one that is applied later is set."""
        epilogue = self.problem.epilogue
        later = _ORDER[_ORDER.index(name) :]
        if any(getattr(epilogue, f) != getattr(Epilogue(), f) for f in later):
            return None
        epilogue = dataclasses.replace(epilogue, **{name: value})
        return dataclasses.replace(
            self,
            problem=dataclasses.replace(self.problem, epilogue=epilogue),
            extras=self.extras if extra is None else {**self.extras, name: extra},
        )

    def build(self, composites: Composites) -> None:
        """Replace the matmul and its consumers by a call of the composite, if there are any."""
        if not self.taken or self.problem == self.matmul.problem:
            return
        last = self.taken[-1]
        with ir.InsertionPoint(last), last.location:
            operands = self.matmul.host_operands()
            operands |= {name: self._operand(name, extra) for name, extra in self.extras.items()}
            y = composites.matmul(self.problem, operands)
            for name, attribute in self.matmul.op.attributes.items():
                if name == "block32.kernel":
                    y.owner.operation.attributes[name] = attribute
            result = _reshaped_like(y, last.results[0])
        last.results[0].replace_all_uses_with(result)
        for op in (*self.taken[::-1], self.matmul.op):
            op.erase()

    def _operand(self, name: str, extra: _Extra) -> ir.Value:
        """The epilogue's operand in the shape that the kernel ABI has."""
        f32 = ir.F32Type.get()
        if extra.operand is None:
            one = ir.RankedTensorType.get([1], f32)
            splat = ir.DenseElementsAttr.get_splat(one, ir.FloatAttr.get(f32, extra.factor))
            return arith.constant(one, splat)
        value = extra.operand.value
        value_type = ir.RankedTensorType(value.type)
        if name == "scale":
            one = ir.RankedTensorType.get([1], f32)
            return tensor.expand_shape(one, value, [], [], [1])
        wanted_rank = 2 if name == "residual" else 1
        if value_type.rank == wanted_rank:
            return value
        groups = [list(range(value_type.rank - wanted_rank + 1))]
        groups += [[i] for i in range(len(groups[0]), value_type.rank)]
        m = ir.ShapedType.get_dynamic_size() if self.problem.m is None else self.problem.m
        shape = [m, *value_type.shape[len(groups[0]) :]]
        collapsed = ir.RankedTensorType.get(shape, value_type.element_type)
        return tensor.collapse_shape(collapsed, value, groups)


def _users(value: ir.Value) -> list[ir.Operation]:
    """The users of a value. Its sizes are asked of something else first."""
    for use in list(value.uses):
        if use.owner.name == "tensor.dim":
            _ask_elsewhere(use.owner.operation, value)
    return [use.owner.operation for use in value.uses]


def _ask_elsewhere(dim: ir.Operation, value: ir.Value) -> None:
    """Replace ``tensor.dim value`` by the size of what the value's op was given."""
    producer, axis = value.owner.operation, dim.operands[1]
    if isinstance(axis.owner, ir.Block) or "value" not in axis.owner.operation.attributes:
        return
    number = ir.IntegerAttr(axis.owner.operation.attributes["value"]).value
    value_type = ir.RankedTensorType(value.type)
    with ir.InsertionPoint(dim), dim.location:
        if not value_type.is_dynamic_dim(number):
            size = constant(value_type.shape[number])
        elif producer.name == "linalg.generic":
            size = tensor.dim(producer.operands[len(producer.operands) - 1], axis)
        elif producer.name == "tensor.expand_shape":
            earlier = sum(value_type.is_dynamic_dim(i) for i in range(number))
            size = producer.operands[1 + earlier]
        else:
            size = tensor.dim(producer.operands[0], axis)
    dim.results[0].replace_all_uses_with(size)
    dim.erase()


def _is_elementwise(op: ir.Operation) -> bool:
    iterators = [str(kind) for kind in ir.ArrayAttr(op.attributes["iterator_types"])]
    maps = ir.ArrayAttr(op.attributes["indexing_maps"])
    result = ir.AffineMapAttr(maps[len(maps) - 1]).value
    is_parallel = all("parallel" in kind for kind in iterators)
    return (
        len(op.results) == 1 and is_parallel and result == ir.AffineMap.get_identity(len(iterators))
    )


def _reshaped_like(y: ir.Value, old: ir.Value) -> ir.Value:
    """The matrix y in the shape of the value that it replaces."""
    old_type = ir.RankedTensorType(old.type)
    if old_type.rank == 2:
        return y
    init = old.owner.operation.operands[len(old.owner.operation.operands) - 1]
    groups = [list(range(old_type.rank - 1)), [old_type.rank - 1]]
    return tensor.expand_shape(old_type, y, groups, dynamic_sizes(init), list(old_type.shape))
