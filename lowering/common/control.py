# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops and branches of kernels, as Python functions and ``with`` blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from iree.compiler import ir
from iree.compiler.dialects import scf

from block32.lowering.common.index import Condition, Index, IndexValue, as_typed_value

#: The body of a loop: from the counter and the carried values to the next carried values.
LoopBody = Callable[[IndexValue, list[ir.Value]], Sequence[ir.Value]]


def for_loop(
    count: Index, carried: Sequence[ir.Value], body: LoopBody, counter_type: ir.Type
) -> list[ir.Value]:
    """Run ``body`` for 0 <= i < ``count``; gives the carried values after the last iteration.

    Args:
        count: How often; of ``counter_type`` where it is an SSA value.
        carried: Values that travel from iteration to iteration.
        body: Called once, to build the iteration.
        counter_type: The type of i, such as ``i32``.
    """
    zero, end, one = (as_typed_value(bound, counter_type) for bound in (0, count, 1))
    loop = scf.ForOp(zero, end, one, list(carried))
    with ir.InsertionPoint(loop.body):
        scf.yield_(list(body(IndexValue(loop.induction_variable), list(loop.inner_iter_args))))
    return list(loop.results)


@contextmanager
def when(condition: Condition) -> Iterator[None]:
    """Ops built inside run only where ``condition`` holds.

    A Python ``True`` adds no branch. ``False`` is the caller's to handle: it would build dead code.
    """
    if isinstance(condition, bool):
        assert condition, "a branch that is never taken must not be built"
        yield
        return
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])
