"""`meshwright export`: write a run or a Hugging Face directory as a directory that Hugging Face's libraries load."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.cli.loading import byte_bar, load_with_bar
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.errors import MeshwrightError
from meshwright.options.declare import Json, Mesh, option, positional
from meshwright.pictures.text import next_line, wrap
from meshwright.units import parse_bytes, show_bytes

EXAMPLES = (
    "meshwright export runs/tiny exported",
    "meshwright export runs/tiny exported --dtype bf16 --max-file-size 1G",
    "meshwright export Llama-3.2-1B Llama-3.2-1B-f32 --dtype f32",
)


@dataclass(frozen=True)
class Args:
    """Write a model as a Hugging Face directory: safetensors, config.json, generation config and tokenizer."""

    model: Annotated[Path, positional("RUN|DIR")]
    """A run directory of `meshwright train`, or a Hugging Face directory."""
    output: Annotated[Path, positional("DIR")]
    """The directory to write; a new one, or an empty one."""
    dtype: Annotated[Literal["bf16", "f16", "f32"] | None, option("bf16|f16|f32")] = None
    """Dtype of the weights. Default: as stored."""
    max_file_size: Annotated[str, option("BYTES")] = "5G"
    """Weights of more bytes are written in several files, with an index. Default: 5G."""
    adapter: Annotated[Path | None, option("DIRECTORY")] = None
    """Add these adapters, as PEFT writes them, to the weights of a directory. Default: none."""
    adapter_only: Annotated[bool, option()] = False
    """For a LoRA run: write only the adapters, in PEFT's format. Default: merge them into the weights."""
    on: Annotated[str, option("CHIPS")] = "cpu:1"
    """The hardware that the weights pass through. Default: cpu:1, which holds them in this machine's memory."""
    mesh: Mesh = None
    """The mesh of that hardware, as fsdp=8. Default: all devices along fsdp."""
    json: Json = False
    """Print {"directory", "parameters", "dtype", "files"}."""


def run(args: Args) -> int:
    """Write the directory and print its contents."""
    try:
        most = parse_bytes(args.max_file_size)
    except MeshwrightError as error:
        raise MeshwrightError(f"--max-file-size: {error}") from None
    if most < 1:
        raise MeshwrightError(f"--max-file-size is {args.max_file_size}; it is a number of bytes from 1, as 5G")
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import find_model
        from meshwright.execution.models.inference.save import check_target

    check_target(args.output)
    if args.adapter_only:
        return _export_adapter(args)
    found = find_model(args.model, on=args.on, mesh=args.mesh, adapter=args.adapter)
    dtype, as_json = args.dtype or found.stored_dtype, args.json
    check_all_read(args)
    model = load_with_bar(found)
    with byte_bar("writing the weights", model.num_parameters * dtype_bytes(dtype)) as on_bytes:
        model.save(args.output, dtype=dtype, max_file_bytes=most, on_bytes=on_bytes)
    _print_written(args.output, "", model.num_parameters, dtype, as_json=as_json)
    if not as_json:
        print(next_line(f"meshwright generate {shlex.quote(str(args.output))} --on {found.system} 'def '"))
    return 0


def _export_adapter(args: Args) -> int:
    """Write a run's adapters and print the directory's contents."""
    from meshwright.execution.loading.adapter import save_adapter

    output, as_json = args.output, args.json
    source, on, dtype = args.model, args.on, args.dtype or "f32"
    check_all_read(args, "with --adapter-only")
    count = save_adapter(source, output, on=on, dtype=dtype)
    _print_written(output, "adapters of ", count, dtype, as_json=as_json)
    return 0


def _print_written(directory: Path, what: str, parameters: int, dtype: str, *, as_json: bool) -> None:
    """Print a directory's contents: files with their bytes. what: words before the number of parameters."""
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    if as_json:
        data = {"directory": str(directory), "parameters": parameters, "dtype": dtype, "files": files}
        print(json.dumps(data, indent=2))
        return
    sizes = ", ".join(f"{name} {show_bytes(size)}" for name, size in files.items())
    print("\n".join(wrap(f"wrote {directory}: {what}{parameters:,} parameters in {dtype}: {sizes}")))
