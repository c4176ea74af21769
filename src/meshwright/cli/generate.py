"""`meshwright generate`: text from a run's last checkpoint, on the mesh it was trained on or another."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli.arguments import Json, Mesh, option, positional
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.mesh import parse_mesh

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
    from meshwright.training import read_config

    _check(args)
    config = read_config(args.run)
    system = parse_system(args.on or config.hardware)
    # Stages are for training: one token would go through them one after the other.
    is_same = args.mesh is None and str(system) == config.hardware and config.mesh.pp == 1
    mesh = config.mesh if is_same else parse_mesh(args.mesh or "dp=1,fsdp=-1", num_devices=system.num_devices)
    from meshwright.runtime import claim_devices

    claim_devices(system)
    from meshwright.training.generate import generate

    pieces: list[bytearray] = [bytearray() for _ in range(args.num_samples)]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    streams = not args.json and args.num_samples == 1
    if streams:
        print(args.prompt, end="", flush=True)
    for chosen in generate(
        args.run, config, mesh, prompt=args.prompt.encode(), num_samples=args.num_samples,
        num_tokens=args.num_tokens, temperature=args.temperature, seed=args.seed,
    ):  # fmt: skip
        for piece, byte in zip(pieces, chosen, strict=True):
            piece.append(byte)
        if streams:
            print(decoder.decode(bytes([chosen[0]])), end="", flush=True)
    texts = [args.prompt + piece.decode(errors="replace") for piece in pieces]
    _finish(args, texts, streams=streams)
    return 0


def _check(args: Args) -> None:
    """Raise where a number cannot be meant."""
    for name, value, least in (
        ("num-tokens", args.num_tokens, 1),
        ("num-samples", args.num_samples, 1),
        ("temperature", args.temperature, 0),
    ):
        if value < least:
            raise MeshwrightError(f"--{name} is {value}; it is {least} or more")
    if not args.prompt:
        raise MeshwrightError("--prompt is empty; give at least one character to go on from")


def _finish(args: Args, texts: list[str], *, streams: bool) -> None:
    """Print what has not been printed yet."""
    if args.json:
        print(json.dumps({"prompt": args.prompt, "texts": texts}, indent=2))
    elif streams:
        print()
    else:
        print("\n---\n".join(texts))
