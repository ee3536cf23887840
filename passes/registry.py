# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The one list of block32's passes: ``block32-opt``, the docs and the pipeline read it."""

from __future__ import annotations

from typing import Final

from block32.lowering.target import DeviceFacts
from block32.passes.base import Pass
from block32.passes.declare_functions import DeclareFunctionsPass
from block32.passes.emit import EmitPass
from block32.passes.expand_portable import ExpandPortablePass
from block32.passes.fuse import FusePass
from block32.passes.inline_composites import InlineCompositesPass
from block32.passes.inline_host import InlineHostPass
from block32.passes.isolate import IsolatePass
from block32.passes.lower_onnx import OPERATOR as ONNX_OPERATOR
from block32.passes.lower_onnx import LowerOnnxPass
from block32.passes.lower_torch import OPERATOR as TORCH_OPERATOR
from block32.passes.lower_torch import LowerTorchPass
from block32.passes.mark_weights import MarkWeightsPass
from block32.passes.outline import OutlinePass
from block32.passes.pack_weights import PackWeightsPass
from block32.passes.pipeline import PipelinePass
from block32.passes.quantize_weights import QuantizeWeightsPass
from block32.passes.raise_ import RaisePass
from block32.passes.select_kernel import SelectKernelPass
from block32.passes.spec_script import SpecScriptPass

#: Every pass, in the order of the pipelines: the first two run before IREE's own passes; then come
#: that of ``block32 quantize``, that of ``block32 import checkpoint --model`` and the first of a
#: spec, which alone has the last one too.
PASSES: Final[tuple[type[Pass], ...]] = (
    LowerOnnxPass,
    LowerTorchPass,
    QuantizeWeightsPass,
    MarkWeightsPass,
    IsolatePass,
    RaisePass,
    FusePass,
    SelectKernelPass,
    PackWeightsPass,
    OutlinePass,
    EmitPass,
    InlineCompositesPass,
    ExpandPortablePass,
    InlineHostPass,
    DeclareFunctionsPass,
    SpecScriptPass,
)


def input_pipeline(source: bytes) -> list[PipelinePass]:
    """The passes that run before IREE's, over what importers wrote and IREE does not lower.

    Args:
        source: A module, text or bytecode: passes whose operators it does not name are left out.
    """
    passes = {ONNX_OPERATOR: LowerOnnxPass, TORCH_OPERATOR: LowerTorchPass}
    return [made() for operator, made in passes.items() if operator.encode() in source]


def standard_pipeline(target: str, facts: DeviceFacts) -> list[PipelinePass]:
    """The passes of ``block32 compile``, in order.

    Args:
        target: The target's name.
        facts: What is known of the device.
    """
    features = ",".join(f"+{name}" for name in sorted(facts.cpu_features))
    fuse, select, pack = (
        pass_class(target=target, cpu_features=features, architecture=facts.architecture)
        for pass_class in (FusePass, SelectKernelPass, PackWeightsPass)
    )
    kernels: list[PipelinePass] = [RaisePass(), fuse, select, pack, OutlinePass(), EmitPass()]
    rest = [InlineCompositesPass(), ExpandPortablePass(), InlineHostPass()]
    return [*kernels, *rest, DeclareFunctionsPass()]


def spec_pipeline(target: str, facts: DeviceFacts) -> list[PipelinePass]:
    """The passes of ``block32 spec``: those of a compile, over each distinct matmul once.

    Args:
        target: The target's name.
        facts: What is known of the device.
    """
    return [IsolatePass(), *standard_pipeline(target, facts), SpecScriptPass()]
