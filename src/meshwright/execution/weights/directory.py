"""The tensors of a Hugging Face directory: the file, position, shape and dtype of each.

The files are safetensors (https://huggingface.co/docs/safetensors): 8 bytes with the length of a JSON header, the
header, and the data of each tensor in C order. Tensors are read through memory maps, so that only the parts that are
used are read from disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from meshwright.errors import MeshwrightError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

LFS_POINTER = b"version https://git-lfs.github.com/"
"""The beginning of a file that git-lfs has left in place of a large one."""

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
"""The dtypes in which weights can be read, by their names in a header."""

SCALED_DTYPES: Mapping[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn}
"""Dtypes of weights that need a `Scale`."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `start` is where its data begins, in bytes. scale: of a quantised tensor; else None."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    scale: Scale | None = None

    @property
    def is_readable(self) -> bool:
        """Whether its dtype can be read: one of `DTYPES`, or with a scale one of `SCALED_DTYPES`."""
        return self.dtype in (DTYPES if self.scale is None else SCALED_DTYPES)

    @property
    def numpy_dtype(self) -> Any:
        """The dtype of its data; raises KeyError if it cannot be read."""
        return DTYPES[self.dtype] if self.scale is None else SCALED_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return math.prod(self.shape) * np.dtype(self.numpy_dtype).itemsize

    def open(self) -> np.ndarray:
        """Open the tensor as a read-only memory map, which is closed when nothing refers to it."""
        if not self.nbytes:
            return np.zeros(self.shape, self.numpy_dtype)
        data = np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=(self.nbytes,))
        return data.view(self.numpy_dtype).reshape(self.shape)


class Scale(NamedTuple):
    """Factors of a quantised tensor: one for each block of rows and columns; `block` is the size of a block."""

    tensor: Tensor
    block: tuple[int, int]


def tensor_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype of most of the bytes of some tensors: f32, f16, bf16 or f64."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            continue  # A buffer, or an error when it is used.
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="F32").lower()


def read_files(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a directory by name.

    Raises:
        MeshwrightError: if there are no safetensors; a file is missing, cut short or not safetensors; or an index names
          a tensor in a file that does not hold it.
    """
    if (directory / INDEX).is_file():
        return _read_sharded(directory)
    if (directory / SINGLE).is_file():
        return {tensor.name: tensor for tensor in read_file(directory / SINGLE)}
    if pickled := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)):
        raise MeshwrightError(
            f"{directory} holds {pickled[0]} and no safetensors. A pickle runs code as it is read, so it is not read;"
            f" `save_pretrained` of transformers writes safetensors"
        )
    raise MeshwrightError(f"{directory} holds no weights: neither {SINGLE} nor {INDEX}")


def _read_sharded(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the files that an index names."""
    path = directory / INDEX
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        named: dict[str, set[str]] = {}
        for name, file in files.items():
            named.setdefault(str(file), set()).add(name)
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MeshwrightError(
            f"{path} is not an index of safetensors: it has no weight_map of names to files"
        ) from None
    found: dict[str, Tensor] = {}
    for file, names in sorted(named.items()):
        if Path(file).name != file:
            raise MeshwrightError(f"{path} names the file {file!r}; files are in the same directory")
        held = {tensor.name: tensor for tensor in read_file(directory / file)}
        if absent := sorted(names - held.keys()):
            raise MeshwrightError(f"{directory / file} does not hold {absent[0]}, which {INDEX} says it does")
        if extra := sorted(held.keys() - names):
            raise MeshwrightError(f"{directory / file} holds {extra[0]}, which {INDEX} does not name")
        found |= held
    return found


def read_file(path: Path) -> Iterator[Tensor]:
    """Yield the tensors of a safetensors file; the library checks that its header is complete and its data fills it.

    Raises:
        MeshwrightError: the file is missing, damaged, or only a git-lfs pointer.
    """
    from safetensors import SafetensorError, safe_open  # Of [train] and [serve]; lowering a step loads this module too.

    if not path.is_file():
        raise MeshwrightError(f"{path} is missing" + (f"; {INDEX} names it" if path.name.startswith("model") else ""))
    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise MeshwrightError(
                    f"{path} is a pointer of git-lfs, not the file itself; `git lfs pull` in its directory fetches it"
                ) from None
        raise MeshwrightError(f"{path} is cut short or no safetensors file: {error}") from None
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        yield Tensor(name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])


def write_file(
    path: Path, entries: Iterable[tuple[str, tuple[int, ...], str]], data: Callable[[str], np.ndarray]
) -> None:
    """Write one safetensors file tensor by tensor, so that no more than one is in memory.

    Args:
        entries: the name, shape and dtype of each tensor, as in a header.
        data: returns the tensor of a name, in its dtype.
    """
    start = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    entries = list(entries)
    for name, shape, dtype in entries:
        stop = start + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Data begins at a multiple of 8 bytes.
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _, dtype in entries:
            file.write(np.ascontiguousarray(data(name), DTYPES[dtype]).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
