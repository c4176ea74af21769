"""Convert the sources of a run to token stores; each is made once and kept in the cache."""

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
"""Progress bar of a source by name and bytes, as a context manager that yields a callback for bytes done."""


def run_sources(config: DataConfig) -> list[FileSource | StoreSource]:
    """Return the sources of a run. Several text files without weights are one source."""
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
    """Make the stores of a run's sources that are not in the cache yet, each with a progress bar.

    Raises:
        MeshwrightError: as `open_data`, which makes the stores without a bar.
    """
    for source in run_sources(config):
        if isinstance(source, FileSource) and not (source.kind == "text" and tokenizer is None):
            cached_store(source, config, workload, tokenizer, bar)


def cached_store(
    source: FileSource, config: DataConfig, workload: Workload, tokenizer: Tokenizer | None, bar: Bar
) -> tuple[Path, StoreInfo]:
    """Return the directory of a source's token store in the cache, and its info; a machine makes each store once."""
    fields = None if source.kind == "text" else config.template(source.name)
    encoder = find_encoder(source, fields, tokenizer, vocab=workload.config.vocab)
    what = Tokenizing(source, encoder, config.bad_data, "bytes" if tokenizer is None else "the run's tokenizer")
    with locked_directory(what.signature()) as directory:
        if (directory / STORE).is_file():
            return directory, read_info(directory)
        with bar(source.name, sum(unit.num_bytes for unit in what.units())) as on_bytes:
            return directory, tokenize(what, directory, on_bytes=on_bytes)
