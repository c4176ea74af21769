"""`meshwright tokenize`: convert files to a store of tokens, once for any number of runs."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.cli.loading import byte_bar
from meshwright.cli.typed import check_all_read
from meshwright.errors import MeshwrightError
from meshwright.execution.data.bad_data import Rule, describe_bad
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import find_files
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.text.tokenizer import read_json, read_tokenizer
from meshwright.options.declare import Json, option, positional
from meshwright.pictures.text import next_line, wrap
from meshwright.units import show_count

EXAMPLES = (
    "meshwright tokenize wiki.jsonl -o tokens/wiki --tokenizer Llama-3.2-1B",
    "meshwright tokenize questions.parquet -o tokens/qa --tokenizer Qwen3-0.6B --fields '[question+prompt],answer'",
    "meshwright tokenize chats/ -o tokens/chats --tokenizer Qwen3-0.6B --bad-data skip",
)


@dataclass(frozen=True)
class Args:
    """Tokenize files into a store. After an interruption, the same call continues."""

    sources: Annotated[tuple[str, ...], positional("PATH…")]
    """Files of one format (.jsonl, .jsonl.gz, .parquet, .arrow, text), folders or patterns ('wiki/*.jsonl')."""
    output: Annotated[Path, option("DIRECTORY", "-o")]
    """The store: a new directory, or one that an interrupted call of this command began. Needed."""
    tokenizer: Annotated[Path | None, option("DIRECTORY")] = None
    """A Hugging Face directory with the tokenizer and, for chats, its template. Default: tokens are bytes."""
    fields: Annotated[str | None, option("TEMPLATE")] = None
    """The text of a record, as [question+prompt],answer: + joins fields, commas separate parts, parts in [] have no
    loss.
    """
    pairs: Annotated[bool, option()] = False
    """Records are preferences, with prompt, chosen and rejected (text or messages)."""
    bad_data: Annotated[Rule, option("error|skip")] = "error"
    """For a record that cannot be used: stop and show it, or skip and count it. Default: error."""
    processes: Annotated[int | None, option("N")] = None
    """Number of tokenizing processes. Default: one per core."""
    json: Json = False
    """Print {"directory", "documents", "tokens", "bad_data"}."""


def run(args: Args) -> int:
    """Write the store and print its contents."""
    if not args.sources:
        raise MeshwrightError("tokenize needs files or folders, as wiki.jsonl")
    if args.processes is not None and args.processes < 1:
        raise MeshwrightError(f"--processes is {args.processes}; it is 1 or more")
    source, tokenizer = find_files(args.sources), None
    if args.tokenizer is not None:
        vocab = read_json(args.tokenizer / "config.json").get("vocab_size", 1 << 32)
        if (tokenizer := read_tokenizer(args.tokenizer, vocab=vocab)) is None:
            raise MeshwrightError(f"{args.tokenizer} has no tokenizer.json; --tokenizer names a directory with one")
    encoder = find_encoder(source, args.fields, tokenizer, pairs=args.pairs)
    what = Tokenizing(source, encoder, args.bad_data, str(args.tokenizer or "bytes"))
    output, processes, as_json = args.output, args.processes, args.json
    check_all_read(args)
    size = sum(unit.num_bytes for unit in what.units())
    with byte_bar("tokenising", size) as on_bytes:
        info = tokenize(what, output, processes=processes or 0, on_bytes=on_bytes)
    if as_json:
        found = {"directory": str(output), "documents": info.documents, "tokens": info.tokens, "bad_data": info.bad}
        print(json.dumps(found, indent=2))
        return 0
    made = show_count(info.documents // 2, "pair") if info.form == "pairs" else show_count(info.documents, "document")
    print("\n".join(wrap(f"wrote {output}: {made}, {info.tokens:,} tokens of {info.tokenizer_name}")))
    if left_out := describe_bad(info.bad):
        print("\n".join(wrap(f"left out: {left_out}")))
    print(next_line(f"meshwright train MODEL --data {shlex.quote(str(output))}"))
    return 0
