# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every pass's docstring shows IR before and after; here the pass is run on it.

``...`` in the IR after stands for anything.
"""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from block32.passes.base import Pass, Report
from block32.passes.pipeline import run_pipeline
from block32.passes.registry import PASSES
from block32.tools.compiler import parse_module


def example_of(pass_class: type[Pass]) -> tuple[str, dict[str, str], str]:
    """The IR before, the options, and the IR after, from the docstring of the pass's module."""
    docstring = sys.modules[pass_class.__module__].__doc__ or ""
    before, after = re.search(
        r"^Before::\n\n(.*?)^After(.*)", docstring, re.DOTALL | re.MULTILINE
    ).groups()  # type: ignore[union-attr]
    heading, _, rest = after.partition("::\n\n")
    options = dict(re.findall(r"(\w[\w-]*)=([^\s}]+)", heading))
    block = re.match(r"((?:    .*\n|\n)*)", rest)
    assert block
    return textwrap.dedent(before), options, textwrap.dedent(block[1])


def squeeze(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("pass_class", PASSES, ids=lambda p: p.argument)
def test_the_example_is_what_the_pass_does(pass_class: type[Pass]) -> None:
    before, options, after = example_of(pass_class)
    assert after.strip(), "an example without IR after it checks nothing"
    module = parse_module(before.encode(), "before.mlir")
    run_pipeline(module, [pass_class.from_options(options)], Report())
    pattern = re.escape(squeeze(after)).replace(re.escape("..."), ".*?")
    if not re.search(pattern, squeeze(str(module))):
        pytest.fail(f"{module}\n\ndoes not contain\n\n{after}", pytrace=False)
