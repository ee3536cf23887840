# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The files of a checkpoint: one safetensors file, or shards with or without an index."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from block32.dialects.diagnostics import DiagnosticError
from block32.runtime.checkpoint.config import Declared, read_declared, read_json
from block32.runtime.safetensors import StoredTensor, read_tensors
from block32.runtime.strict_json import shown

_INDEX_SUFFIX: Final = ".safetensors.index.json"
#: ``model-00002-of-00005.safetensors``.
_NUMBERED: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint, none of them read yet.

    Attributes:
        path: The file or folder that was asked for.
        tensors: By name, in the order of the files and of their headers.
        declared: What the configuration says of quantisation.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    declared: Declared | None


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the files of a checkpoint and read their headers.

    Args:
        path: A ``.safetensors`` file, an index, or the folder that holds them.

    Raises:
        DiagnosticError: A file is missing, damaged, out of the folder, or a tensor is in two.
    """
    # os.path, for Path raises on a name that is too long.
    if os.path.isdir(path):  # noqa: PTH112
        index = _index_of(path)
        tensors = _read_index(index) if index else _read_folder(path)
        return Checkpoint(path, tensors, read_declared(path))
    if path.name.endswith(".json"):
        return Checkpoint(path, _read_index(path), read_declared(path.parent))
    return Checkpoint(path, read_tensors(path), read_declared(path.parent))


def _index_of(folder: Path) -> Path | None:
    found = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DiagnosticError(
            os.fspath(folder), f"expected one index but got {names}; name the one to import"
        )
    return found[0] if found else None


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards of a folder without an index."""
    # Hidden ones are what some systems put beside a file of a volume of theirs.
    shards = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if not shards:
        raise DiagnosticError(
            os.fspath(folder), "expected .safetensors files or an index in the folder"
        )
    _check_numbers(folder, shards)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        _check_inside(folder, shard, shard)
        _add(tensors, read_tensors(shard))
    return tensors


def _check_numbers(folder: Path, shards: list[Path]) -> None:
    """Shards that are numbered are all there, and are of one set."""
    matches = [_NUMBERED.fullmatch(shard.name) for shard in shards]
    numbered = [match for match in matches if match]
    if not numbered:
        return
    first = numbered[0]
    count = int(first["count"])
    if len(numbered) != len(shards) or len({(m["stem"], int(m["count"])) for m in numbered}) > 1:
        raise DiagnosticError(
            os.fspath(folder), "the .safetensors files are of several models; name one file"
        )
    present = {int(match["number"]) for match in numbered}
    if len(present) != count or present != set(range(1, len(present) + 1)):
        missing = next(number for number in range(1, count + 2) if number not in present)
        width = len(first["count"])
        name = f"{first['stem']}-{missing:0{width}}-of-{first['count']}.safetensors"
        raise DiagnosticError(
            os.fspath(folder), f"the shard '{name}' is missing: {len(present)} of {count} are there"
        )


def _read_index(index: Path) -> dict[str, StoredTensor]:
    """The tensors that an index names, each from the shard that it names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DiagnosticError(os.fspath(index), "expected 'weight_map', an object with a file each")
    folder = index.parent
    tensors: dict[str, StoredTensor] = {}
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise DiagnosticError(os.fspath(index), "expected the name of a file for each tensor")
    for shard in dict.fromkeys(weight_map.values()):
        _add(tensors, read_tensors(_shard(index, folder, shard)))
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise DiagnosticError(
                os.fspath(tensor.entry.path), f"the tensor '{name}' is not in {index.name}"
            )
        if tensor.entry.path.relative_to(folder) != Path(weight_map[name]):
            raise DiagnosticError(
                os.fspath(tensor.entry.path),
                f"the tensor '{name}' is here, but {index.name} says '{weight_map[name]}'",
            )
    for name, shard in weight_map.items():
        if name not in tensors:
            raise DiagnosticError(
                os.fspath(index), f"the tensor '{shown(name)}' is not in '{shown(shard)}'"
            )
    return tensors


def _shard(index: Path, folder: Path, name: str) -> Path:
    """The path of a shard that an index names.

    Raises:
        DiagnosticError: It is not a file in the index's folder.
    """
    if not name.isprintable() or not name.endswith(".safetensors"):
        raise DiagnosticError(
            os.fspath(index), f"expected the name of a .safetensors file but got '{shown(name)}'"
        )
    parts = PureWindowsPath(name)  # takes both kinds of separators, and drives
    if PurePosixPath(name).is_absolute() or parts.anchor or ".." in parts.parts:
        raise DiagnosticError(
            os.fspath(index), f"the path '{shown(name)}' leads out of the checkpoint's folder"
        )
    path = folder / name
    _check_inside(folder, path, index)
    if not os.path.exists(path):  # noqa: PTH110
        raise DiagnosticError(os.fspath(index), f"the shard '{shown(name)}' is missing")
    return path


def _check_inside(folder: Path, path: Path, named_by: Path) -> None:
    """A link must not lead out of the folder.

    The one exception is the cache of huggingface_hub, ``snapshots/REVISION`` of which holds
    nothing but links to the ``blobs`` two folders up.
    """
    # realpath, for Path.resolve raises on a link to itself.
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parents[1] / "blobs")
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(place) for place in allowed):
        raise DiagnosticError(
            os.fspath(named_by), f"the link '{path.name}' leads out of the checkpoint's folder"
        )


def _add(tensors: dict[str, StoredTensor], more: dict[str, StoredTensor]) -> None:
    for name, tensor in more.items():
        if name in tensors:
            first = tensors[name].entry.path.name
            raise DiagnosticError(
                os.fspath(tensor.entry.path), f"the tensor '{name}' is in {first}, too"
            )
        tensors[name] = tensor
