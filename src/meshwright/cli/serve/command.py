"""`meshwright serve`: run one server, in one process or as one of several processes of a mesh."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING

from meshwright.cli.loading import note, read_with_bar, start_with_bar
from meshwright.cli.serve.args import Args
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.execution.processes.options import ALONE, processes_of
from meshwright.options.serving import ServeArgs
from meshwright.units import show_bytes, show_count

if TYPE_CHECKING:
    from meshwright.serving.engine.engine import Engine

EXAMPLES = (
    "meshwright serve Llama-3.2-1B-Instruct --on cpu:8 --mesh tp=8",
    "meshwright serve runs/tiny --port 0 --batch 8 --context 256",
    "meshwright serve Qwen3-8B --plan serve.yaml",
    "meshwright serve Qwen3-8B --on h100:8 --mesh tp=4 --replicas 2",
    "meshwright serve Qwen3-8B --on v5e:2x4 --mesh tp=8 --kv-dtype int8 --drafts 4",
    "meshwright serve Qwen3-8B --on h100:1 --adapter sql=adapters/sql law=adapters/law",
)


def run(args: Args) -> int:
    """Serve until a signal arrives."""
    own = ServeArgs(**{field.name: getattr(args, field.name) for field in fields(ServeArgs)})
    processes = processes_of(args.process) if own.replicas == 1 else ALONE
    check_all_read(args, "with --replicas")
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import Found
        from meshwright.execution.models.inference.loaded import LoadedModel
        from meshwright.execution.training.run_directory.checkpoint import Note
        from meshwright.serving.server import ServerProgress, run_server

    class Screen(ServerProgress):
        """Prints a server's address on stdout, and everything else on stderr."""

        ends_process = True

        def waiting(self, what: str) -> AbstractContextManager[None]:
            return waiting(what)

        def note(self, line: str) -> None:
            note(line)

        def replica(self, line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        def read(self, found: Found, on_note: Note) -> LoadedModel:
            return read_with_bar(found, on_note)

        def engine_made(self, engine: Engine) -> None:
            _print_layout(engine)

        def start(self, engine: Engine) -> None:
            start_with_bar(engine)

        def ended(self, engine: Engine) -> None:
            from meshwright.serving.engine.decode_stats import show_means

            stats = engine.stats()
            means = engine.means()
            pace = f": {show_means(*means)}" if means else ""
            print(f"served {stats.generated_tokens} tokens in {stats.num_steps} steps{pace}", file=sys.stderr)

    run_server(own, processes, Screen(lambda url: print(f"ready on {url}", flush=True)))
    return 0


def _print_layout(engine: Engine) -> None:
    """Print the batch, context and KV cache of an engine."""
    from meshwright.serving.engine.layout import adapter_bytes

    layout = engine.layout
    at_once = show_count(layout.shards * layout.rows, "sequence")
    cache_tokens = engine.scheduler.num_pages * layout.page_size
    print(
        f"{engine.model.config.name} on {engine.model.system}, mesh {engine.model.mesh_shape}:"
        f" up to {at_once} at once, each of at most {layout.context} tokens;"
        f" a KV cache of {cache_tokens} tokens in pages of {layout.page_size}",
        file=sys.stderr,
    )
    if (settings := engine.settings).adapter_slots:
        slots, size = show_count(settings.adapter_slots, "adapter"), adapter_bytes(engine.model, settings)
        print(f"slots for {slots} of rank {settings.adapter_rank}: {show_bytes(size)} a device", file=sys.stderr)
