"""Convert the sources of a run to token stores; each store is written once, into the cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from meshwright.description.step.workload import Workload
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import FileSource, StoreSource, parse_sources
from meshwright.execution.data.store import STORE, StoreInfo, read_info
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.text.tokenizer import Tokenizer
from meshwright.execution.training.data.cache import locked_directory
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.text_files import standard_library

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows the progress of a source.

Called with the source's name and its bytes; returns a context manager that yields a function, which is called with the
number of bytes done.
"""


def run_sources(config: DataConfig) -> list[FileSource | StoreSource]:
    """Return the sources of a run. Several sources that are all text and have no weights are joined to one source."""
    weighted = parse_sources(config.sources)
    sources = [config.find(path) for path, _ in weighted]
    if not sources:
        return [FileSource("Python's standard library", "text", tuple(standard_library()))]
    texts = [one for one in sources if isinstance(one, FileSource) and one.kind == "text"]
    if len(texts) == len(sources) and len(texts) > 1 and weighted[0].weight is None:
        files = tuple(file for one in texts for file in one.files)
        return [FileSource(" ".join(one.name for one in texts), "text", files)]
    return sources


def tokenize_sources(config: DataConfig, workload: Workload, tokenizer: Tokenizer | None, bar: Bar) -> None:
    """Write the token stores of a run's sources that are not in the cache yet, each with a progress bar.

    Raises:
        MeshwrightError: as in `open_data`, which writes missing stores without a bar.
    """
    for source in run_sources(config):
        if isinstance(source, FileSource) and not (source.kind == "text" and tokenizer is None):
            cached_store(source, config, workload, tokenizer, bar)


def cached_store(
    source: FileSource, config: DataConfig, workload: Workload, tokenizer: Tokenizer | None, bar: Bar
) -> tuple[Path, StoreInfo]:
    """Return the cached token store of a source: its directory and its description. Write it first if it is missing."""
    fields = None if source.kind == "text" else config.template(source.name)
    encoder = find_encoder(source, fields, tokenizer, vocab=workload.config.vocab)
    what = Tokenizing(source, encoder, config.bad_data, "bytes" if tokenizer is None else "the run's tokenizer")
    with locked_directory(what.signature()) as directory:
        if (directory / STORE).is_file():
            return directory, read_info(directory)
        with bar(source.name, sum(unit.num_bytes for unit in what.units())) as on_bytes:
            return directory, tokenize(what, directory, on_bytes=on_bytes)
