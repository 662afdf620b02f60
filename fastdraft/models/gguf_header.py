"""The header of a GGUF file: read once, checked against the file's size, and written anew in parts.

A GGUF file is a magic, counts, key-value pairs, a table of tensors and, aligned, the tensors' data.
transformers parses each of hundreds of thousands of vocabulary entries with numpy, several times over a load:
tens of seconds. Here they are walked once with ``struct``, and the copy that transformers takes the weights
from does not have them.
"""

from __future__ import annotations

import math
import mmap
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fastdraft.errors import ModelLoadError

__all__ = [
    "Field",
    "GGUFHeader",
    "TensorEntry",
    "check_magic",
    "check_tensors",
    "read_header",
    "write_copy",
]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_AGAIN = "The download may have stopped early, or be a web page or git-lfs pointer: get the file again."


@dataclass(frozen=True)
class Field:
    """One key-value pair: its bytes in the file are ``[start, end)``."""

    key: str
    is_array: bool
    start: int
    end: int


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table; ``shape`` starts with the fastest dimension, ``offset`` from the data."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Everything in a GGUF file but the tensors' data.

    Attributes:
        path: The file.
        version: The format's version.
        metadata: The values by key.
        fields: Where each key-value pair lies.
        tensors: The tensor table.
        table: The table's bytes in the file, ``[start, end)``.
        alignment: What the data's start is a multiple of.
        data_start: Where the tensors' data begins.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    fields: tuple[Field, ...]
    tensors: tuple[TensorEntry, ...]
    table: tuple[int, int]
    alignment: int
    data_start: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, as ``qwen2``."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def tokens(self) -> list[str]:
        """The vocabulary in id order."""
        return list(self.metadata.get("tokenizer.ggml.tokens", ()))

    @property
    def token_types(self) -> list[int]:
        """A type for each token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte."""
        return list(self.metadata.get("tokenizer.ggml.token_type", ()))


class _Reader:
    """Reads values one after the other; running over the end is a ``struct.error``."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        start, end = self.position, self.position + length
        if end > len(self.data):
            raise struct.error("a string runs over the end")
        self.position = end
        return self.data[start:end].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise struct.error(f"there is no value type {kind}")
        item, count = self.take("IQ")
        if item in _SCALARS:
            if count > len(self.data):  # before struct builds a layout of that length
                raise struct.error("an array runs over the end")
            return self.take(f"{count}{_SCALARS[item]}")
        return [self.value(item) for _ in range(count)]


def check_magic(path: Path) -> None:
    """Raises ``ModelLoadError`` unless the file starts as a GGUF file this module reads."""
    if not path.is_file():
        raise ModelLoadError(f"{path} is not a file.", hint="Give the path of a .gguf file.")
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), file.read(4)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.", hint="Check its permissions.") from error
    if magic != _MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}.", hint=_AGAIN)
    if len(version) < 4:
        raise ModelLoadError(f"{path} ends after {len(magic + version)} bytes.", hint=_AGAIN)
    number = int.from_bytes(version, "little")
    if number not in _VERSIONS:
        swapped = int.from_bytes(version, "big") in _VERSIONS
        found = "big-endian" if swapped else f"GGUF version {number}"
        raise ModelLoadError(
            f"{path} is {found}; little-endian versions 2 and 3 can be read.", hint="Convert the model anew."
        )


def read_header(path: Path) -> GGUFHeader:
    """Reads and checks a file's header.

    Raises:
        ModelLoadError: Not a GGUF file, a damaged or truncated one, or one part of a split model.
    """
    check_magic(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, data)
    except (struct.error, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"The header of {path} is truncated or damaged ({error}).", hint=_AGAIN) from error
    if not header.architecture:
        raise ModelLoadError(f"{path} does not name its architecture.", hint="It may hold no language model.")
    if header.metadata.get("split.count", 1) > 1:
        raise ModelLoadError(
            f"{path} is one part of {header.metadata['split.count']}.",
            hint="Join them first: llama-gguf-split --merge <first part> <joined file>.",
        )
    return header


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    reader = _Reader(data)
    _, version, tensor_count, field_count = reader.take("4sIQQ")
    metadata: dict[str, Any] = {}
    fields = []
    for _ in range(field_count):
        start = reader.position
        key = reader.string()
        (kind,) = reader.take("I")
        metadata[key] = reader.value(kind)
        fields.append(Field(key, kind == _ARRAY, start, reader.position))
    table_start = reader.position
    tensors = []
    for _ in range(tensor_count):
        name = reader.string()
        (dimensions,) = reader.take("I")
        shape = reader.take(f"{dimensions}Q")
        tensors.append(TensorEntry(name, shape, *reader.take("IQ")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error(f"the alignment is {alignment!r}")
    return GGUFHeader(
        path=path,
        version=version,
        metadata=metadata,
        fields=tuple(fields),
        tensors=tuple(tensors),
        table=(table_start, reader.position),
        alignment=alignment,
        data_start=-(-reader.position // alignment) * alignment,
    )


def check_tensors(header: GGUFHeader, block_sizes: Mapping[int, tuple[int, int]]) -> None:
    """Checks that every tensor's data lies inside the file.

    Args:
        header: The file's header.
        block_sizes: Elements and bytes of a block, by ggml type.

    Raises:
        ModelLoadError: A tensor's type is unknown, or the file ends before its data does.
    """
    size = header.path.stat().st_size
    for tensor in header.tensors:
        if tensor.ggml_type not in block_sizes:
            raise ModelLoadError(
                f"{header.path}: tensor {tensor.name!r} has the unknown ggml type {tensor.ggml_type}.",
                hint="Upgrade the gguf package, or take another quantisation of the model.",
            )
        elements, nbytes = block_sizes[tensor.ggml_type]
        end = header.data_start + tensor.offset + math.prod(tensor.shape) // elements * nbytes
        if end > size:
            raise ModelLoadError(
                f"{header.path} is truncated: it has {size} bytes, and tensor {tensor.name!r} ends at {end}.",
                hint=_AGAIN,
            )


def write_copy(header: GGUFHeader, target: Path, *, vocabulary: bool, tensors: bool) -> None:
    """Writes the file anew without the tokenizer's arrays or without the tensors; the rest is as it was.

    Args:
        header: The file's header.
        target: The file to write.
        vocabulary: Keep the tokenizer's arrays.
        tensors: Keep the tensors.
    """
    kept = [
        field for field in header.fields if vocabulary or not (field.is_array and field.key.startswith("tokenizer."))
    ]
    count = len(header.tensors) if tensors else 0
    with header.path.open("rb") as source, target.open("wb") as out:
        out.write(struct.pack("<4sIQQ", _MAGIC, header.version, count, len(kept)))
        for field in kept:
            _copy(source, out, field.start, field.end)
        if tensors:
            _copy(source, out, *header.table)
        out.write(bytes(-out.tell() % header.alignment))
        if tensors:
            source.seek(header.data_start)
            shutil.copyfileobj(source, out, 1 << 24)


def _copy(source: BinaryIO, out: BinaryIO, start: int, end: int) -> None:
    source.seek(start)
    out.write(source.read(end - start))
