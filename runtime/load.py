# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loading a vmfb into the IREE runtime, and calling its functions with NumPy arrays.

::

    module = block32.load("model.vmfb")
    y = module["main"](x_codes, x_scales)

A module is checked before the runtime gets it, because the runtime does not look at everything: it
takes code for CPU features that this CPU lacks, and ends the process when it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import iree.runtime
import numpy as np
import numpy.typing as npt

from block32.runtime.entry import opened
from block32.runtime.errors import CallError, LoadError, VmfbError
from block32.runtime.fit import (
    Requirement,
    requirements,
    version_cure,
    version_problem,
    what_would_work,
)
from block32.runtime.machine import (
    RUNTIME_ERRORS,
    Machine,
    architecture,
    cpu_features,
    hal_version,
    runtime_reason,
    runtime_version,
    this_machine,
)
from block32.runtime.signature import (
    ANY_BUFFER,
    SCALARS,
    Signature,
    ValueType,
    parse_declaration,
    signless,
)
from block32.runtime.vmfb import Vmfb, read_vmfb

AnyArray = npt.NDArray[Any]
PathOrBytes = bytes | bytearray | memoryview | str | os.PathLike[str]


def load(
    vmfb: PathOrBytes,
    device: str = "local-task",
    *,
    parameters: Mapping[str, str | os.PathLike[str]] = MappingProxyType({}),
) -> Module:
    """Load a compiled module.

    Args:
        vmfb: Its bytes, or the path of its file.
        device: A device of the runtime: ``local-task``, ``local-sync``, ``hip``, ``cuda://0``, ...
        parameters: Files (``.irpa``, ``.safetensors``, ``.gguf``) of the module's external
            parameters by their scope; the scope is empty for parameters without one.

    Raises:
        LoadError: The file cannot be read, is no module, is cut off, belongs to another version of
            IREE or to another machine, needs parameters, or the device is unknown.
    """
    contents = read_vmfb(vmfb)
    hal_device = _open_device(device, contents.source)
    _check_fit(contents, device)
    instance = iree.runtime.VmInstance()
    try:
        vm_module = _vm_module(instance, vmfb)
    except RUNTIME_ERRORS as error:
        raise VmfbError(
            contents.source, f"the runtime refuses the module: {runtime_reason(error)}"
        ) from error
    modules = [iree.runtime.create_hal_module(instance, hal_device)]
    if parameters or "io_parameters" in contents.dependencies:
        modules.append(_parameters_module(instance, parameters, contents.source))
    try:
        context = iree.runtime.VmContext(instance, [*modules, vm_module])
    except RUNTIME_ERRORS as error:
        raise _explain(contents, error) from error
    return Module(contents, device, hal_device, context, vm_module)


class Module:
    """A loaded module: its exported functions by name.

    Attributes:
        name: The name it was compiled with.
        device: The device that it runs on.
        source: Its file, or ``<vmfb>``.
    """

    def __init__(
        self,
        contents: Vmfb,
        device: str,
        hal_device: Any,
        context: iree.runtime.VmContext,
        vm_module: iree.runtime.VmModule,
    ):
        self.name = contents.name
        self.device = device
        self.source = contents.source
        self._functions: dict[str, Function] = {}
        for name, declaration in contents.declarations.items():
            signature = parse_declaration(declaration)
            vm_function = vm_module.lookup_function(name)
            if signature is not None and vm_function is not None:
                invoker = iree.runtime.FunctionInvoker(context, hal_device, vm_function)
                self._functions[name] = Function(signature, invoker, hal_device)

    def __getitem__(self, name: str) -> Function:
        """A function.

        Raises:
            CallError: There is none of this name.
        """
        if name not in self._functions:
            known = ", ".join(self._functions) or "none"
            raise CallError(self.source, f"no function '{name}'; expected one of: {known}")
        return self._functions[name]

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __repr__(self) -> str:
        functions = "; ".join(str(function.signature) for function in self._functions.values())
        return f"<block32 module '{self.name}' on {self.device}: {functions}>"


class Function:
    """A function of a loaded module; call it with one argument for each of its inputs."""

    def __init__(self, signature: Signature, invoker: Any, hal_device: Any):
        self.signature = signature
        self._invoker = invoker
        self._device = hal_device

    def __call__(self, *arguments: Any) -> Any:
        """Run it once.

        Args:
            arguments: NumPy arrays (or what ``numpy.asarray`` takes) of exactly the declared shape
                and type, Python numbers for scalars. An 8-bit float may be given as raw uint8 or
                int8 bytes, and a byte as an 8-bit float; no value is ever converted.

        Returns:
            One result, a tuple of several, or None: NumPy arrays, Python numbers for scalars.

        Raises:
            CallError: The arguments do not fit, or the runtime failed.
        """
        return self.bind(*arguments).run().fetch()

    def bind(self, *arguments: Any) -> Call:
        """Check the arguments and copy them to the device, to run the call later, or often.

        Raises:
            CallError: The arguments do not fit.
        """
        signature = self.signature
        if signature.is_async:
            raise CallError(
                signature.name,
                "the function takes fences; compile it without "
                "--iree-execution-model=async-external",
            )
        if len(arguments) != len(signature.arguments):
            raise CallError(
                signature.name,
                f"expected {len(signature.arguments)} arguments but got {len(arguments)}",
                (f"the function is {signature}",),
            )
        values: list[Any] = []
        for number, (value, expected) in enumerate(
            zip(arguments, signature.arguments, strict=True)
        ):
            try:
                values.append(self._to_device(value, expected))
            except (TypeError, ValueError, OverflowError) as error:
                raise CallError(signature.name, f"argument {number}: {error}") from error
        return Call(signature, self._invoker, values)

    def _to_device(self, value: Any, expected: ValueType) -> Any:
        if expected.element == ANY_BUFFER:
            return iree.runtime.asdevicearray(self._device, np.asarray(value, order="C"))
        if expected.shape is None:
            return check_scalar(value, expected)
        return iree.runtime.asdevicearray(self._device, check_array(value, expected))


class Call:
    """A function with its arguments on the device."""

    def __init__(self, signature: Signature, invoker: Any, values: list[Any]):
        self._signature = signature
        self._invoker = invoker
        self._values = values
        self._outputs: tuple[Any, ...] = ()

    def run(self) -> Call:
        """Run it, and wait for its end; results stay on the device until ``fetch``.

        Raises:
            CallError: The runtime failed.
        """
        try:
            outputs = self._invoker(*self._values)
        except RUNTIME_ERRORS as error:
            raise CallError(
                self._signature.name, f"the runtime failed: {runtime_reason(error)}"
            ) from error
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return self

    def fetch(self) -> Any:
        """The results of the last run: one, a tuple of several, or None."""
        results = tuple(
            output.to_host() if isinstance(output, iree.runtime.DeviceArray) else output
            for output in self._outputs
        )
        return results[0] if len(results) == 1 else results


def check_scalar(value: Any, expected: ValueType) -> int | float:
    """A number that a scalar argument of type ``expected`` can hold.

    Raises:
        TypeError: It is no number of that kind, or the type cannot be passed.
        OverflowError: It does not fit.
    """
    if expected.element not in SCALARS:
        raise TypeError(f"an argument of type {expected} cannot be passed from Python")
    bits = SCALARS[expected.element]
    kind = np.asarray(value)
    if kind.ndim or kind.dtype.kind not in ("fiub" if bits == 0 else "iub"):
        raise TypeError(f"expected a number of type {expected} but got {_describe(value)}")
    if bits == 0:
        return float(value)
    return signless(int(value), expected.element)


def check_array(value: Any, expected: ValueType) -> AnyArray:
    """The array that a tensor argument of type ``expected`` gets: contiguous, of its dtype.

    Raises:
        TypeError: The element types differ, or NumPy has none for the expected one.
        ValueError: The shapes differ.
    """
    if expected.dtype is None:
        raise TypeError(f"an argument of type {expected} cannot be passed from Python")
    shape = cast(tuple[int | None, ...], expected.shape)
    array = np.asarray(value)
    same_rank = array.ndim == len(shape)
    if not same_rank or any(
        want not in (None, got) for got, want in zip(array.shape, shape, strict=True)
    ):
        raise ValueError(f"expected {expected} but got {_describe(array)}")
    if not _same_bits(array.dtype, expected.dtype):
        raise TypeError(f"expected {expected} but got {_describe(array)}")
    # ascontiguousarray would make a 0-d array 1-d.
    return np.asarray(array, order="C").view(expected.dtype)


def _same_bits(got: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Whether an array may be passed for a type by its bytes, as signless integers or raw bytes."""
    if got == want:
        return True
    if got.kind == "u" and want.kind == "i":
        return got.itemsize == want.itemsize and got.isnative
    raw = {np.dtype(np.int8), np.dtype(np.uint8)}
    floats = got.name.startswith("float8_") or want.name.startswith("float8_")
    return got.itemsize == want.itemsize == 1 and floats and bool({got, want} & raw)


def _describe(value: Any) -> str:
    array = np.asarray(value)
    if array.dtype.kind in "OUS":
        return repr(value)[:60]
    return f"{array.dtype.name} of shape {array.shape}" if array.ndim else f"{array.dtype.name}"


def _open_device(device: str, source: str) -> Any:
    known = ", ".join(sorted(iree.runtime.query_available_drivers()))
    driver = device.partition(":")[0]
    if driver not in iree.runtime.query_available_drivers():
        raise LoadError(source, f"unknown device '{device}'; expected one of: {known}")
    try:
        return iree.runtime.get_device(device)
    except RUNTIME_ERRORS as error:
        raise LoadError(
            source, f"device '{device}' is not available: {runtime_reason(error)}"
        ) from error


def _check_fit(contents: Vmfb, device: str) -> None:
    """Refuse a module of another version, for another device, or for another CPU."""
    version = runtime_version()
    problem = version_problem(contents, hal_version(), version)
    if problem:
        raise LoadError(contents.source, problem, (version_cure(version),))
    needs = requirements(contents)
    driver = device.partition(":")[0]
    usable = [need for need in needs if driver in need.drivers]
    if needs and not usable:
        wanted = " or ".join(need.describe() for need in needs)
        devices = " or ".join(f"--device={need.drivers[0]}" for need in needs)
        raise LoadError(
            contents.source,
            f"the module needs {wanted}, {devices}, but the device is {device}",
            (what_would_work(needs, architecture()),),
        )
    reasons = [need.why_not(_machine_for(need)) for need in usable]
    if reasons and all(reasons):
        raise LoadError(
            contents.source,
            f"the module {reasons[0]}",
            (what_would_work(needs, architecture()),),
        )


def _machine_for(need: Requirement) -> Machine:
    """What has to be known of this machine: GPUs are only looked for where one is needed."""
    if need.drivers[0] != "local-task":
        return this_machine()
    return Machine(architecture(), "", cpu_features(), (), 0)


def _vm_module(instance: iree.runtime.VmInstance, vmfb: PathOrBytes) -> iree.runtime.VmModule:
    if isinstance(vmfb, bytes | bytearray | memoryview):
        return iree.runtime.VmModule.copy_buffer(instance, vmfb)
    return iree.runtime.VmModule.mmap(instance, os.fspath(vmfb))


def _parameters_module(
    instance: iree.runtime.VmInstance,
    parameters: Mapping[str, str | os.PathLike[str]],
    source: str,
) -> iree.runtime.VmModule:
    if not parameters:
        raise LoadError(
            source,
            "the module's parameters are in files of their own, and none is given",
            ("give it with --parameters=SCOPE=FILE, or load(..., parameters={scope: file})",),
        )
    providers: list[Any] = []
    for scope, path in parameters.items():
        index = iree.runtime.ParameterIndex()
        # The runtime's own words for these two are hard to understand.
        with opened(Path(path)) as (_, size):
            if size == 0:
                raise LoadError(os.fspath(path), "cannot read the parameters: the file is empty")
        try:
            index.load(os.fspath(path))
        except RUNTIME_ERRORS as error:
            raise LoadError(
                os.fspath(path), f"cannot read the parameters: {runtime_reason(error)}"
            ) from error
        providers.append(index.create_provider(scope=scope))
    return iree.runtime.create_io_parameters_module(instance, *providers)


def _explain(contents: Vmfb, error: Exception) -> LoadError:
    """What the runtime's refusal of a module that was read without error means."""
    reason = runtime_reason(error)
    version = runtime_version()
    if "version mismatch" in reason or "signature mismatch" in reason:
        message = f"the module belongs to another version of IREE than {version}: {reason}"
        return LoadError(contents.source, message, (version_cure(version),))
    return LoadError(contents.source, f"the runtime cannot start the module: {reason}")
