"""The arguments of `meshwright generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.description.step.weight_formats import WeightDtype
from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import Rule
from meshwright.options.declare import Json, option, positional
from meshwright.options.serving import LoadArgs

if TYPE_CHECKING:
    from meshwright.execution.models.generation.sampling import Sampling


@dataclass(frozen=True)
class Args(LoadArgs):
    """Generate text with a model whose KV cache is split over the mesh, and print the speed."""

    weight_dtype: Annotated[WeightDtype | None, option("int8|int4|fp8")] = None
    """Store the weights of layers in this format, with scales, as serve does. Default: the compute dtype."""
    texts: Annotated[tuple[str, ...], positional("PROMPT…")] = ()
    """Prompts. Default: "def " for a run; with --chat on a terminal, typed there."""
    prompt: Annotated[tuple[str, ...], option("TEXT…")] = ()
    """The same as PROMPT…"""
    prompts: Annotated[Path | None, option("FILE")] = None
    """A file with a prompt a line; in .jsonl each line is {"prompt": text or tokens} or {"messages": […]}."""
    data: Annotated[Path | None, option("FILE")] = None
    """A file of any size with prompts as for --prompts (.jsonl, .parquet, .arrow); answers go to -o."""
    output: Annotated[Path | None, option("FILE", "-o")] = None
    """Answers to --data, an object a line. A second call continues with unanswered lines."""
    bad_data: Annotated[Rule, option("error|skip")] = "error"
    """For a line of --data that is not a prompt: stop before the first answer, or skip and count it."""
    batch: Annotated[int | None, option("N")] = None
    """Maximum number of texts generated at once with --data, over all devices. Default: 64."""
    context: Annotated[int | None, option("N")] = None
    """Maximum tokens of a prompt and its answer with --data. Default: the trained length, at most 4096."""
    chat: Annotated[bool, option()] = False
    """Use prompts as user messages in the model's chat template; without a prompt, chat on the terminal."""
    num_tokens: Annotated[int, option("N")] = 200
    """Maximum tokens to generate. Default: 200."""
    temperature: Annotated[float, option("T")] = 0.7
    """0: always the likeliest token; 1: the model's distribution. Default: 0.7."""
    top_k: Annotated[int, option("N")] = 0
    """Sample from the N likeliest tokens. Default: all."""
    top_p: Annotated[float, option("SHARE")] = 1.0
    """Sample from the likeliest tokens with this total probability. Default: 1, all."""
    min_p: Annotated[float, option("SHARE")] = 0.0
    """Sample from tokens with at least this fraction of the highest probability. Default: 0, all."""
    repetition_penalty: Annotated[float, option("RATIO")] = 1.0
    """Divide logits of tokens already in the text by this. Default: 1, none."""
    seed: Annotated[int, option("N")] = 0
    """Seed of sampling; each text uses the next seed. Default: 0."""
    num_samples: Annotated[int, option("N")] = 1
    """Texts to generate for each prompt. Default: 1."""
    stop: Annotated[tuple[str, ...], option("TEXT…")] = ()
    """Texts that end a text."""
    stop_tokens: Annotated[tuple[int, ...], option("N…")] = ()
    """Tokens that end a text. Default: those in the model's files."""
    json: Json = False
    """Print {"texts", "measured", "predicted"} when all is written."""


def samplings(args: Args, count: int) -> list[Sampling]:
    """Return the sampling options of each of a prompt's `count` samples, which differ in the seed."""
    from meshwright.execution.models.generation.sampling import Sampling

    every: dict[str, Any] = {"temperature": args.temperature, "repetition_penalty": args.repetition_penalty}
    if args.temperature == 0:
        if count > 1:
            raise MeshwrightError(f"--num-samples {count} at --temperature 0 are all one text; leave it out")
        return [Sampling(**every)]
    every |= {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
    return [Sampling(**every, seed=args.seed + number) for number in range(count)]
