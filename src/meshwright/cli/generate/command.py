"""`meshwright generate`: generate text with a model on any mesh, and print measured and predicted speed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from meshwright.cli.generate.args import Args, samplings
from meshwright.cli.generate.data import answer_data
from meshwright.cli.generate.prompts import converse, one_way, read_prompts
from meshwright.cli.loading import load_with_bar, note, note_advised_mesh
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.step.serving import Serving, ServingLayout
from meshwright.errors import MeshwrightError
from meshwright.pictures.tables import console, show
from meshwright.planning.cost.kv_cache import sequence_cache_bytes
from meshwright.planning.serving.plan import planned_speed
from meshwright.units import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.execution.models.inference.loaded import LoadedModel, Prompt
    from meshwright.execution.models.inference.stream import GenerateOptions, TokenText

EXAMPLES = (
    'meshwright generate runs/tiny "def " --num-tokens 200',
    "meshwright generate runs/tiny --on cpu:2 --mesh 1,2,1,1 --num-samples 4",
    'meshwright generate Llama-3.2-1B-Instruct --on cpu:8 --mesh tp=8 --chat --prompt "What is a mesh?"',
    "meshwright generate Llama-3.2-1B --on cpu:8 --prompts prompts.jsonl --temperature 0 --json",
    "meshwright generate Llama-3.2-1B --on cpu:8 --data prompts.jsonl -o answers.jsonl",
)


@dataclass(frozen=True)
class Speed:
    """Seconds until every text has its first token, and tokens per second after that; None if no tokens follow."""

    first_token_seconds: float
    tokens_per_second: float | None

    def __str__(self) -> str:
        rate = "" if self.tokens_per_second is None else f", then {show_rate(self.tokens_per_second, 'tok/s')}"
        return show_seconds(self.first_token_seconds) + rate


def run(args: Args) -> int:
    """Print the texts (a single one while it is generated) and the speed."""
    for name in ("num_tokens", "num_samples"):
        if getattr(args, name) < 1:
            raise MeshwrightError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it is 1 or more")
    if "" in args.stop:
        taken = " ".join(map(repr, args.stop))
        raise MeshwrightError(
            f"--stop has an empty text, at which every completion would end at once; it takes all words after it"
            f" ({taken}), so put a PROMPT before it"
        )
    ways = {"PROMPT": args.texts, "--prompt": args.prompt, "--prompts": args.prompts, "--data": args.data}
    source = one_way(ways)
    if args.data is not None:
        return answer_data(args, args.data)
    prompts = None if source is None else read_prompts(source)
    if prompts is None and args.chat and not sys.stdin.isatty():
        raise MeshwrightError("--chat without a prompt talks on a terminal, and there is none; give a prompt")
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import find_model
        from meshwright.execution.models.inference.prompts import as_message

    samples = samplings(args, args.num_samples if prompts or not args.chat else 1)
    options: GenerateOptions = {"max_tokens": args.num_tokens, "stop": args.stop}
    if args.stop_tokens:
        options["stop_tokens"] = args.stop_tokens
    found = find_model(
        args.model, on=args.on, mesh=args.mesh, dtype=args.dtype, adapter=args.adapter, weight_dtype=args.weight_dtype
    )
    compile_cache = args.compile_cache
    if prompts is None and args.chat:
        check_all_read(args, "in a conversation")
        if args.mesh is None:
            note_advised_mesh(found, 1)
        return converse(load_with_bar(found, compile_cache), {**options, "sampling": samples[0]})
    if prompts is None and found.run is None:
        raise MeshwrightError(f"{args.model} needs a prompt: PROMPT, --prompt TEXT or --prompts FILE")
    rows = [prompt for prompt in prompts or ["def "] for _ in samples]
    rows = [as_message(prompt) for prompt in rows] if args.chat else rows
    options["sampling"] = samples * (len(rows) // len(samples))
    as_json = args.json
    check_all_read(args, "here" if args.temperature else "at --temperature 0")
    kept = Serving(model=found.model, prompt_len=1, output_len=args.num_tokens, kv_dtype=found.dtype)
    cache, there = len(rows) * sequence_cache_bytes(kept), found.system.usable_bytes * found.system.num_devices
    if cache > there:
        raise MeshwrightError(
            f"--num-tokens {args.num_tokens:,} of {len(rows):,} texts need a cache of {show_bytes(cache)}; the devices"
            f" have {show_bytes(there)}"
        )
    model = load_with_bar(found, compile_cache)
    prompt_len = max(len(model.encode(row)) for row in rows)
    longest = prompt_len + args.num_tokens
    if model.seq_len is not None and longest > model.seq_len:
        note(
            f"prompt and text are {longest:,} tokens; {found.path} was trained on sequences of {model.seq_len:,}, and"
            f" what is written beyond that may make no sense"
        )
    if args.mesh is None:
        note_advised_mesh(found, len(rows))
    with waiting(f"compiling {model.config.name} on {model.mesh_shape} for {model.system}"):
        model.compile(rows, **options)
    texts, measured = _write(model, rows, options, streams=not as_json and len(rows) == 1)
    planned = _planned(model, len(rows), prompt_len, args.num_tokens)
    if as_json:
        speeds = {"measured": asdict(measured), "predicted": planned and asdict(planned)}
        print(json.dumps({"texts": texts} | speeds, indent=2))
    else:
        if len(rows) > 1:
            print("\n---\n".join(_shown(row, text["text"] or "") for row, text in zip(rows, texts, strict=True)))
        print()
        show(console(), f"measured: first token in {measured}" + (f"   (predicted: {planned})" if planned else ""))
    return 0


def _write(
    model: LoadedModel, rows: list[Prompt], options: GenerateOptions, *, streams: bool
) -> tuple[list[dict[str, Any]], Speed]:
    """Generate the texts; return each row's prompt and text as data, and the measured speed.

    streams: print the only text while it is generated.
    """
    from meshwright.execution.models.inference.loaded import Chat
    from meshwright.execution.models.inference.stream import collect

    pieces: list[TokenText] = []
    times = [perf_counter()]
    if streams:
        print(_shown(rows[0], ""), end="", flush=True)
    for piece in model.stream(rows, **options):
        times.append(perf_counter())
        pieces.append(piece)
        if streams:
            print(piece.text if model.tokenizer else f" {piece.token}", end="", flush=True)
    if streams:
        print()
    made = collect(pieces, has_text=model.tokenizer is not None)
    # The first step has a piece of every row.
    later, seconds = len(pieces) - len(rows), times[-1] - times[len(rows)]
    speed = Speed(times[len(rows)] - times[0], later / seconds if later else None)
    prompts = [asdict(row) if isinstance(row, Chat) else row for row in rows]
    return [{"prompt": row} | asdict(text) for row, text in zip(prompts, made, strict=True)], speed


def _shown(prompt: Prompt, text: str) -> str:
    """Return a prompt and the text that continues it; in a chat, only the text."""
    return prompt + text if isinstance(prompt, str) else text


def _planned(model: LoadedModel, count: int, prompt_len: int, num_tokens: int) -> Speed | None:
    """Return the predicted speed of generating `count` texts at once; None if the model or mesh cannot be planned."""
    from meshwright.execution.models.generation.generate import cache_split

    texts = Serving(
        model=model.config, batch=count, prompt_len=prompt_len, output_len=num_tokens, kv_dtype=model.dtype,
        weight_dtype=model.weight_dtype or model.dtype, compute_dtype=model.dtype,
    )  # fmt: skip
    layout = ServingLayout(model.mesh_shape, cache_split(model.config, model.mesh_shape, count))
    speed = planned_speed(texts, layout, model.system, prompts=count)
    return speed and Speed(speed.first_token_seconds, count / speed.step_seconds if num_tokens > 1 else None)
