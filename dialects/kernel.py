# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``block32.kernel``: which kernel computes a matmul, one tier for each range of M.

In IR it is a dictionary: ``{target = "cpu", tiers = [{form = "stream", max_m = 8}, {form = "tiled",
tile = [6, 64, 128]}]}``. A kernel runs for M up to its tier's ``max_m``; the last tier has none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from block32.dialects import builtin
from block32.dialects.diagnostics import BadAttributeError

ATTRIBUTE = "block32.kernel"

FORMS = ("tiled", "packed", "stream", "gemv", "grouped", "portable")
REDUCTIONS = ("in_launch", "second_launch")
QUANTIZE_FORMS = ("fused", "separate", "none")


@dataclass(frozen=True)
class KernelTier:
    """One kernel configuration, and the largest M that it serves.

    Attributes:
        form: The kind of kernel, one of ``FORMS``.
        max_m: Largest M that this tier serves; None in the last tier.
        tile: (M, N, K) elements that a workgroup owns and the K step that it takes.
        k_pack: K panels that share one matrix instruction's rows (packed form).
        splits: Workgroups that share one output tile, each on a part of K.
        reduce: Where the partial sums of splits are added.
        mma: (M, N, K) of the matrix instruction; on CPUs, of what one pass of the innermost loop
            takes: rows of x, columns of y and K that are held in registers.
        warps: Subgroups in a workgroup.
        stages: Depth of the software pipeline.
        order: Which tiles are neighbours in the launch, ``"n"`` or ``"m"`` fastest.
        waves_per_eu: Register budget hint on AMD, 0 to leave it to the compiler.
        weight_layout: The order of the weight's bytes that the kernel reads.
        quantize: Whether the activation is quantised in the kernel, by a launch, or not at all.
        isa: On CPUs, the name of the instruction set that the kernel is written for.
    """

    form: str
    max_m: int | None = None
    tile: tuple[int, int, int] | None = None
    k_pack: int = 1
    splits: int = 1
    reduce: str = "in_launch"
    mma: tuple[int, int, int] | None = None
    warps: int = 1
    stages: int = 1
    order: str = "n"
    waves_per_eu: int = 0
    weight_layout: str = "plain"
    quantize: str = "none"
    isa: str = ""

    @classmethod
    def parse(cls, attribute: ir.Attribute) -> KernelTier:
        """Read one tier from its dictionary attribute.

        Raises:
            BadAttributeError: An unknown field, a missing form, or a value of the wrong kind.
        """
        fields = builtin.to_python(attribute)
        if not isinstance(fields, dict):
            raise BadAttributeError(f"expected a dictionary for a tier but got {attribute}")
        known = {field.name for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise BadAttributeError(
                    f"unknown field '{name}' in a tier; expected one of {', '.join(sorted(known))}"
                )
        if "form" not in fields:
            raise BadAttributeError(f"a tier needs a form; expected one of {', '.join(FORMS)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        tier = cls(**values)
        tier._check_kinds()
        return tier

    def _check_kinds(self) -> None:
        """Refuse values that no target could accept."""
        _check_choice("form", self.form, FORMS)
        _check_choice("reduce", self.reduce, REDUCTIONS)
        _check_choice("order", self.order, ("n", "m"))
        _check_choice("quantize", self.quantize, QUANTIZE_FORMS)
        for name in ("weight_layout", "isa"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise BadAttributeError(f"expected a string for {name} but got {value}")
        for name in ("max_m", "k_pack", "splits", "warps", "stages"):
            value = getattr(self, name)
            if name == "max_m" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadAttributeError(f"expected a positive integer for {name} but got {value}")
        if not isinstance(self.waves_per_eu, int) or not 0 <= self.waves_per_eu <= 8:
            raise BadAttributeError(f"expected 0 to 8 for waves_per_eu but got {self.waves_per_eu}")
        for name in ("tile", "mma"):
            value: Any = getattr(self, name)
            if value is None:
                continue
            is_shape = isinstance(value, tuple) and len(value) == 3
            if not is_shape or not all(isinstance(v, int) and v > 0 for v in value):
                raise BadAttributeError(f"expected three positive integers for {name}")

    def build(self) -> ir.Attribute:
        """The tier as a dictionary attribute; fields at their default are left out."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "form" or getattr(self, field.name) != field.default
        }
        return builtin.from_python(changed)

    def describe(self) -> str:
        """The tier for a remark, such as ``tiled 6x64x128, 4 splits``."""
        parts = [self.isa, self.form] if self.isa else [self.form]
        if self.tile:
            parts.append("x".join(map(str, self.tile)))
        if self.k_pack > 1:
            parts.append(f"K_PACK {self.k_pack}")
        if self.splits > 1:
            parts.append(f"split-K {self.splits} {self.reduce}")
        if self.weight_layout != "plain":
            parts.append(f"over {self.weight_layout}")
        if self.quantize != "none":
            parts.append(f"quantize {self.quantize}")
        return " ".join(parts)


@dataclass(frozen=True)
class KernelConfig:
    """The tiers of one matmul, and the target that they are meant for."""

    target: str
    tiers: tuple[KernelTier, ...]

    @classmethod
    def parse(cls, attribute: ir.Attribute) -> KernelConfig:
        """Read ``block32.kernel``.

        Raises:
            BadAttributeError: The attribute is not of this module's form.
        """
        if not isinstance(attribute, ir.DictAttr) or "target" not in attribute:
            raise BadAttributeError("expected a dictionary with 'target' and 'tiers'")
        if "tiers" not in attribute or not isinstance(attribute["tiers"], ir.ArrayAttr):
            raise BadAttributeError("expected an array 'tiers'")
        target = builtin.to_python(attribute["target"])
        if not isinstance(target, str):
            raise BadAttributeError("expected a string for 'target'")
        tiers = tuple(KernelTier.parse(tier) for tier in ir.ArrayAttr(attribute["tiers"]))
        config = cls(target, tiers)
        config._check_order()
        return config

    def _check_order(self) -> None:
        if not self.tiers:
            raise BadAttributeError("expected at least one tier")
        limits = [tier.max_m for tier in self.tiers]
        if limits[-1] is not None:
            raise BadAttributeError("the last tier serves every larger M: expected no max_m in it")
        bounded = limits[:-1]
        if None in bounded or bounded != sorted(set(bounded)):  # type: ignore[type-var]
            raise BadAttributeError("expected max_m to rise from tier to tier")

    def build(self) -> ir.Attribute:
        """The configuration as an attribute."""
        return ir.DictAttr.get(
            {
                "target": ir.StringAttr.get(self.target),
                "tiers": ir.ArrayAttr.get([tier.build() for tier in self.tiers]),
            }
        )

    def describe(self) -> str:
        """The tiers for a remark, each with the rows that it serves."""
        return "; ".join(
            (f"M <= {tier.max_m}: " if tier.max_m else "") + tier.describe() for tier in self.tiers
        )

    def tier_for(self, m: int) -> KernelTier:
        """The tier that runs for this M."""
        return next(t for t in self.tiers if t.max_m is None or m <= t.max_m)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadAttributeError(f"expected one of {', '.join(choices)} for {name} but got {value}")
