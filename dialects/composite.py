# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.composite``: an operation that has no upstream op, as a function that is its meaning.

A composite is a private ``util.func`` with ``inlining_policy = #util.inline.never``, whose body
says in plain linalg what it computes. The attribute identifies it, never its name, so that a
target may replace a call with a kernel; where none does, the body is inlined and compiled as it
is. ``{kind = "quantize", rule = "rceil", element = "f8E4M3FN"}`` is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir

from block32.dialects import builtin
from block32.dialects import problem as problem_attribute
from block32.dialects.block_scale import SCALE_RULES
from block32.dialects.diagnostics import BadAttributeError, error_at
from block32.dialects.problem import QUANTIZED_FROM
from block32.lowering.host import operand_types, result_type
from block32.lowering.problem import BLOCK_K, SCALE_TYPE, ScaledMatmul, ceil_div

ATTRIBUTE = "block32.composite"

#: What activations may be quantised to.
QUANTIZED_TO = ("f8E4M3FN", "f8E5M2")


@dataclass(frozen=True)
class Quantize:
    """``(x [M, K]) -> (codes [M, K], scales [M, ceil(K/32)])``: one scale a row and 32 K.

    Attributes:
        rule: How the scale follows from the largest magnitude, one of ``SCALE_RULES``.
        element: The element type of the codes, one of ``QUANTIZED_TO``.
    """

    rule: str = "rceil"
    element: str = "f8E4M3FN"

    kind = "quantize"

    def build(self) -> ir.Attribute:
        """The attribute."""
        return builtin.from_python({"kind": self.kind, "rule": self.rule, "element": self.element})

    @classmethod
    def from_fields(cls, fields: dict[str, object]) -> Quantize:
        """Read the attribute's fields.

        Raises:
            BadAttributeError: An unknown field or value.
        """
        _check_known(fields, ("rule", "element"))
        composite = cls(str(fields.get("rule", "rceil")), str(fields.get("element", "f8E4M3FN")))
        _check_choice("rule", composite.rule, SCALE_RULES)
        _check_choice("element", composite.element, QUANTIZED_TO)
        return composite

    def check_signature(self, signature: ir.FunctionType) -> None:
        """Check a function's type against the shapes above.

        Raises:
            BadAttributeError: The function is of another type.
        """
        inputs, results = _tensor_types(signature.inputs), _tensor_types(signature.results)
        if len(inputs) != 1 or len(results) != 2 or inputs[0].rank != 2:
            raise BadAttributeError(f"expected (x) -> (codes, scales) on matrices, got {signature}")
        (x,), (codes, scales) = inputs, results
        _check_choice("the element type of x", str(x.element_type), QUANTIZED_FROM)
        if x.is_dynamic_dim(1):
            raise BadAttributeError(f"expected a static K but got {x}")
        for name, got, columns, element in (
            ("codes", codes, x.shape[1], self.element),
            ("scales", scales, ceil_div(x.shape[1], BLOCK_K), SCALE_TYPE),
        ):
            wanted = ir.RankedTensorType.get([x.shape[0], columns], ir.Type.parse(element))
            if got != wanted:
                raise BadAttributeError(f"expected {name} of type {wanted} but got {got}")


@dataclass(frozen=True)
class Matmul:
    """A block-scaled matmul that ``linalg.scaled_contract`` cannot say.

    ``(arguments of problem.argument_names) -> y [M, N]``, with the types of
    ``host.operand_types``. The kinds, and what each says beyond the upstream op:

    - ``matmul_w8a16``: the activation has no scales.
    - ``matmul_dynamic``: the activation is quantised first; the same bits as ``quantize`` and the
      matmul of its results.
    - ``scaled_matmul``: the activation has scales, and there is an epilogue.
    - ``grouped_matmul``: ``(lhs [M, K], rhs [experts, N, K], scales..., offsets [groups + 1],
      expert_ids [groups], init [M, N])``. Row m of y is

      - of group g, ``offsets[g] <= m < offsets[g + 1]``, with an expert: the product with the
        weight ``rhs[expert_ids[g]]``;
      - of a group whose id is no expert (-1, or any that is not below ``experts``): zeros, and no
        weight is read;
      - of no group: row m of ``init``.

      Offsets rise, in 0..M; with others the rows of y are undefined, and nothing outside y is
      written. Groups may be empty, experts repeat and come in any order.
    """

    problem: ScaledMatmul

    @property
    def kind(self) -> str:
        """The kind that the attribute names."""
        if self.problem.grouping:
            return "grouped_matmul"
        if self.problem.lhs_quantize:
            return "matmul_dynamic"
        return "scaled_matmul" if self.problem.lhs_scaled else "matmul_w8a16"

    def build(self) -> ir.Attribute:
        """The attribute."""
        problem = problem_attribute.build(self.problem)
        return builtin.from_python({"kind": self.kind, "problem": problem})

    @classmethod
    def from_fields(cls, fields: dict[str, object]) -> Matmul:
        """Read the attribute's fields.

        Raises:
            BadAttributeError: An unknown field or a malformed problem.
        """
        _check_known(fields, ("problem",))
        if "problem" not in fields:
            raise BadAttributeError("missing field 'problem'")
        return cls(problem_attribute.parse(builtin.from_python(fields["problem"])))

    def check_signature(self, signature: ir.FunctionType) -> None:
        """Check a function's type against the problem.

        Raises:
            BadAttributeError: The function is of another type.
        """
        inputs = list(operand_types(self.problem).values())
        wanted = ir.FunctionType.get(inputs, [result_type(self.problem)])
        if signature != wanted:
            raise BadAttributeError(f"expected a function of type {wanted} but got {signature}")


Composite = Quantize | Matmul

_KINDS: dict[str, type[Quantize] | type[Matmul]] = {
    "quantize": Quantize,
    "grouped_matmul": Matmul,
    "matmul_dynamic": Matmul,
    "matmul_w8a16": Matmul,
    "scaled_matmul": Matmul,
}


def is_composite(op: ir.Operation | ir.OpView) -> bool:
    """Whether ``op`` is a function that carries the attribute."""
    return op.operation.name == "util.func" and ATTRIBUTE in op.operation.attributes


def parse(attribute: ir.Attribute) -> Composite:
    """Read ``block32.composite``.

    Raises:
        BadAttributeError: No dictionary, an unknown kind, field or value.
    """
    fields = builtin.to_python(attribute)
    if not isinstance(fields, dict) or "kind" not in fields:
        raise BadAttributeError("expected a dictionary with 'kind'")
    kind = fields.pop("kind")
    _check_choice("kind", kind, tuple(_KINDS))
    composite = _KINDS[kind].from_fields(fields)
    if composite.kind != kind:
        raise BadAttributeError(f"expected kind {composite.kind} for this problem but got {kind}")
    return composite


def of_function(function: ir.Operation | ir.OpView) -> Composite | None:
    """The composite that a ``util.func`` is, or None for an ordinary function.

    Raises:
        DiagnosticError: The attribute is malformed, or does not fit the function's type; or the
            function has no body and became an import of IREE's.
    """
    if not is_composite(function):
        return None
    operation = function.operation
    if _is_import(operation):
        raise error_at(
            operation,
            "is a composite that is declared only, which iree-compile takes for an import; "
            "expected a body that says what it computes",
        )
    try:
        with operation.context, ir.Location.unknown():
            composite = parse(operation.attributes[ATTRIBUTE])
            signature = ir.TypeAttr(operation.attributes["function_type"]).value
            composite.check_signature(ir.FunctionType(signature))
    except BadAttributeError as error:
        raise error_at(operation, f"has a malformed '{ATTRIBUTE}': {error}") from error
    return composite


def _is_import(function: ir.Operation) -> bool:
    """Whether IREE took a function without a body for one of the runtime's, of buffer views."""
    signature = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    types = map(str, (*signature.inputs, *signature.results))
    return not list(function.regions[0].blocks) and "!hal.buffer_view" in types


def _tensor_types(types: list[ir.Type]) -> list[ir.RankedTensorType]:
    if not all(isinstance(t, ir.RankedTensorType) for t in types):
        raise BadAttributeError("expected tensors only")
    return [ir.RankedTensorType(t) for t in types]


def _check_known(fields: dict[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise BadAttributeError(f"unknown field '{unknown[0]}'; expected {', '.join(known)}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadAttributeError(f"expected {name} to be one of {', '.join(choices)}, got {value}")
