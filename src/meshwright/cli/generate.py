"""`meshwright generate`: text from a run's last checkpoint, on the mesh it was trained on or another."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from meshwright.cli.arguments import Json, Mesh, option, positional
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.mesh import parse_mesh
from meshwright.planner import read_system
from meshwright.units import show_bytes

if TYPE_CHECKING:
    from meshwright.training import RunConfig

EXAMPLES = (
    'meshwright generate runs/tiny --prompt "def " --num-tokens 200',
    "meshwright generate runs/tiny --on cpu:2 --mesh 1,2,1,1 --num-samples 4",
)


@dataclass(frozen=True)
class Args:
    """Write text with a trained model, a byte at a time, with a KV cache split over the mesh."""

    run: Annotated[tyro.conf.Positional[Path], positional("RUN")]
    """The run directory that `meshwright train` made."""
    prompt: Annotated[str, option("TEXT")] = "def "
    """What the text begins with. Default: "def "."""
    num_tokens: Annotated[int, option("N")] = 200
    """The bytes to write. Default: 200."""
    temperature: Annotated[float, option("T")] = 0.7
    """0 always takes the likeliest byte, 1 samples as the model says. Default: 0.7."""
    num_samples: Annotated[int, option("N")] = 1
    """The texts to write; a multiple of dp*fsdp is split over them. Default: 1."""
    on: Annotated[str | None, option("CHIPS")] = None
    """The hardware. Default: that of the run."""
    mesh: Mesh = None
    """The mesh, as 1,2,1,1 or fsdp=2. Default: that of the run."""
    seed: Annotated[int, option("N")] = 0
    """Decides what is sampled. Default: 0."""
    json: Json = False
    """Print {"prompt", "texts"} when all is written."""


def run(args: Args) -> int:
    """Print the texts, a single one as it is written."""
    _check(args)
    with waiting("loading JAX"):
        from meshwright.training import check_seed, read_config

    if args.temperature > 0:
        check_seed(args.seed)
    elif args.num_samples > 1:
        raise MeshwrightError(f"--num-samples {args.num_samples} at --temperature 0 are all one text; leave it out")
    config = read_config(args.run)
    system = read_system(args.on or config.hardware, config.hardware_file)
    # Stages are for training: one token would go through them one after the other.
    is_same = args.mesh is None and str(system) == config.hardware and config.mesh.pp == 1
    mesh = config.mesh if is_same else parse_mesh(args.mesh or "dp=1,fsdp=-1", num_devices=system.num_devices)
    prompt = args.prompt.encode(errors="surrogateescape")
    _check_size(args, config, len(prompt), system.usable_bytes * system.num_devices)
    seed, as_json = args.seed if args.temperature > 0 else 0, args.json
    check_all_read(args, "at --temperature 0")
    with waiting(f"starting {system}"):
        from meshwright.runtime import claim_devices

        claim_devices(system)
        from meshwright.training.generate import generate

    pieces: list[bytearray] = [bytearray() for _ in range(args.num_samples)]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    streams = not as_json and args.num_samples == 1
    chosen = generate(
        args.run, config, mesh, prompt=prompt, num_samples=args.num_samples, num_tokens=args.num_tokens,
        temperature=args.temperature, seed=seed, on_note=_note,
    )  # fmt: skip
    with waiting("reading the checkpoint, compiling"):
        first = list(
            itertools.islice(chosen, 2)
        )  # The prompt is read by one program, and bytes are written by another.
    if streams:
        print(args.prompt, end="", flush=True)
    for bytes_ in itertools.chain(first, chosen):
        for piece, byte in zip(pieces, bytes_, strict=True):
            piece.append(byte)
        if streams:
            print(decoder.decode(bytes([bytes_[0]])), end="", flush=True)
    texts = [args.prompt + piece.decode(errors="replace") for piece in pieces]
    _finish(args, texts, streams=streams)
    return 0


def _note(line: str) -> None:
    """A line for the user that is no part of the text."""
    print(f"note: {line}", file=sys.stderr)


def _check(args: Args) -> None:
    """Raise where a number cannot be meant."""
    for name, value, least in (
        ("num-tokens", args.num_tokens, 1),
        ("num-samples", args.num_samples, 1),
        ("temperature", args.temperature, 0),
    ):
        if not value >= least:
            raise MeshwrightError(f"--{name} is {value}; it is {least} or more")
    if math.isinf(args.temperature):
        raise MeshwrightError("--temperature is inf; it is a number from 0, where 1 samples as the model says")
    if not args.prompt:
        raise MeshwrightError("--prompt is empty; give at least one character to go on from")


def _check_size(args: Args, config: RunConfig, prompt_len: int, usable_bytes: float) -> None:
    """Raise where no text can be written, or its cache is larger than the devices; a note where it is longer than any
    sequence of the training."""
    from meshwright.training import check_vocab

    check_vocab(config)
    model, length = config.workload.config, prompt_len + args.num_tokens
    size = {"f32": 4}.get(config.workload.compute_dtype, 2)
    cache = 2 * size * model.num_layers * model.num_kv_heads * model.head_dim * args.num_samples * length
    if cache > usable_bytes:
        raise MeshwrightError(
            f"--num-tokens {args.num_tokens:,} of {args.num_samples:,} samples need a cache of {show_bytes(cache)}; the"
            f" devices have {show_bytes(usable_bytes)}"
        )
    if length > config.workload.seq_len:
        _note(
            f"prompt and tokens are {length:,} bytes; {args.run} was trained on sequences of"
            f" {config.workload.seq_len:,}, and what is written beyond that may make no sense"
        )


def _finish(args: Args, texts: list[str], *, streams: bool) -> None:
    """Print what has not been printed yet."""
    if args.json:
        print(json.dumps({"prompt": args.prompt, "texts": texts}, indent=2))
    elif streams:
        print()
    else:
        print("\n---\n".join(texts))
