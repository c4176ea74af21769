"""The arguments of `meshwright generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from meshwright.cli.arguments import Json, option, positional
from meshwright.cli.loading import ModelArgs
from meshwright.data import Rule
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.models import Sampling


@dataclass(frozen=True)
class Args(ModelArgs):
    """Write text with a model, with a KV cache split over the mesh, and say how fast it came."""

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], positional("PROMPT…")] = ()
    """What the texts begin with. Default: "def " of a run; of --chat on a terminal, what is typed there."""
    prompt: Annotated[tuple[str, ...], option("TEXT…")] = ()
    """The same as PROMPT…"""
    prompts: Annotated[Path | None, option("FILE")] = None
    """A file with a prompt a line; of a .jsonl each line is {"prompt": text or tokens} or {"messages": […]}."""
    data: Annotated[Path | None, option("FILE")] = None
    """A file of any size with a prompt a line as --prompts has them (.jsonl, .parquet, .arrow), answered into -o."""
    output: Annotated[Path | None, option("FILE", "-o")] = None
    """The answers to --data, an object a line; called again, it goes on with the lines that have none."""
    bad_data: Annotated[Rule, option("error|skip")] = "error"
    """A line of --data that is no prompt: error stops before the first answer, skip leaves it out and counts it."""
    rows: Annotated[int | None, option("N")] = None
    """The most texts that --data makes at once, over all devices. Default: 64."""
    context: Annotated[int | None, option("N")] = None
    """The most tokens of a text of --data with its prompt. Default: as trained, at most 4096."""
    chat: Annotated[bool, option()] = False
    """Take a prompt as a user's message, in the model's chat template; without a prompt talk on the terminal."""
    num_tokens: Annotated[int, option("N")] = 200
    """The most tokens to write. Default: 200."""
    temperature: Annotated[float, option("T")] = 0.7
    """0 always takes the likeliest token, 1 samples as the model says. Default: 0.7."""
    top_k: Annotated[int, option("N")] = 0
    """Sample from the N likeliest tokens. Default: all."""
    top_p: Annotated[float, option("SHARE")] = 1.0
    """Sample from the likeliest tokens whose probabilities reach this share together. Default: 1, all."""
    min_p: Annotated[float, option("SHARE")] = 0.0
    """Sample from tokens at least this share as likely as the likeliest. Default: 0, all."""
    repetition_penalty: Annotated[float, option("RATIO")] = 1.0
    """What the logits of tokens that the text already has are divided by. Default: 1, none."""
    seed: Annotated[int, option("N")] = 0
    """Decides what is sampled; each text has the next one. Default: 0."""
    num_samples: Annotated[int, option("N")] = 1
    """The texts to write of each prompt. Default: 1."""
    stop: Annotated[tuple[str, ...], option("TEXT…")] = ()
    """Texts that end a text."""
    stop_tokens: Annotated[tuple[int, ...], option("N…")] = ()
    """Tokens that end a text. Default: those that the model's own files name."""
    json: Json = False
    """Print {"texts", "measured", "planned"} when all is written."""


def samplings(args: Args, count: int) -> list[Sampling]:
    """How each sample of a prompt is chosen."""
    from meshwright.models import Sampling

    every: dict[str, Any] = {"temperature": args.temperature, "repetition_penalty": args.repetition_penalty}
    if args.temperature == 0:
        if count > 1:
            raise MeshwrightError(f"--num-samples {count} at --temperature 0 are all one text; leave it out")
        return [Sampling(**every)]
    every |= {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
    return [Sampling(**every, seed=args.seed + number) for number in range(count)]
