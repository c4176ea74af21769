"""The tensors of a Hugging Face directory: in which file each is, where in the file, and its shape and dtype.

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
"""Name of the file of weights, if there is only one; else the name of the index of the files."""

LFS_POINTER = b"version https://git-lfs.github.com/"
"""The first bytes of a pointer file, which git-lfs leaves in place of a large file that it has not fetched."""

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
"""The dtypes of weights that can be read, by their names in safetensors headers."""

SCALED_DTYPES: Mapping[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn}
"""The dtypes of weights that can be read together with a `Scale`, by their names in safetensors headers."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file.

    dtype: the dtype's name in the header. start: the byte of the file where the data begins. scale: the scales of a
    quantised tensor, else None.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    scale: Scale | None = None

    @property
    def is_readable(self) -> bool:
        """Whether the tensor can be read: its dtype is one of `DTYPES`, or with a scale one of `SCALED_DTYPES`."""
        return self.dtype in (DTYPES if self.scale is None else SCALED_DTYPES)

    @property
    def numpy_dtype(self) -> Any:
        """The dtype of the data; raises KeyError if it cannot be read."""
        return DTYPES[self.dtype] if self.scale is None else SCALED_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the data."""
        return math.prod(self.shape) * np.dtype(self.numpy_dtype).itemsize

    def open(self) -> np.ndarray:
        """Return the tensor as a read-only memory map, which is closed when nothing refers to it."""
        if not self.nbytes:
            return np.zeros(self.shape, self.numpy_dtype)
        data = np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=(self.nbytes,))
        return data.view(self.numpy_dtype).reshape(self.shape)


class Scale(NamedTuple):
    """The factors by which a quantised matrix is multiplied, one for each block of it.

    tensor: the factors [blocks of rows, blocks of columns]. block: rows and columns of a block.
    """

    tensor: Tensor
    block: tuple[int, int]


def tensor_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype that most bytes of the tensors have: f32, f16, bf16 or f64; f32 if none has one of these."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            continue  # A buffer, or a weight that cannot be read, which raises when it is used.
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="F32").lower()


def read_files(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a directory by name.

    Raises:
        MeshwrightError: there are no safetensors; a file is missing, cut short or not safetensors; or the index and
          the files name different tensors.
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
    """Return the tensors of a directory with an index, by name."""
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
    """Yield the tensors of a safetensors file. The safetensors library checks its header and its size.

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
    """Write one safetensors file, tensor by tensor, so that only one is in memory at a time.

    Args:
        entries: (name, shape, dtype) of each tensor; dtypes are keys of `DTYPES`.
        data: returns the tensor of a name; it is called once for each tensor, in order.
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
