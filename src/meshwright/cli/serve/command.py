"""`meshwright serve`: run one server, in one process or as one of several processes of a mesh."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.loading import note, note_advised_mesh, read_with_bar, start_with_bar
from meshwright.cli.processes import report_end_to_others
from meshwright.cli.serve.args import Args, hosts_and_origins, limits_and_keys
from meshwright.cli.serve.plan import check_model, options_of_plan, read_decode_plan
from meshwright.cli.serve.replicas import serve_replicas
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.execution.processes.member import leave_at_once
from meshwright.units import show_count

if TYPE_CHECKING:
    from meshwright.execution.models.inference.loaded import LoadedModel
    from meshwright.execution.processes.member import Member
    from meshwright.serving.engine.engine import Engine
    from meshwright.serving.engine.runner import Work
    from meshwright.serving.engine.settings import EngineSettings
    from meshwright.serving.http.service import ApiKey, Limits, Service

EXAMPLES = (
    "meshwright serve Llama-3.2-1B-Instruct --on cpu:8 --mesh tp=8",
    "meshwright serve runs/tiny --port 0 --rows 8 --context 256",
    "meshwright serve Qwen3-8B --plan serve.yaml",
    "meshwright serve Qwen3-8B --on h100:8 --mesh tp=4 --replicas 2",
    "meshwright serve Qwen3-8B --on v5e:2x4 --mesh tp=8 --kv-dtype int8 --drafts 4",
)


PLAN_OPTIONS = ("on", "mesh", "dtype", "rows", "context", "page_size", "cache", "kv_dtype", "weight_dtype")
"""Options that a serving plan can give instead."""


def run(args: Args) -> int:
    """Serve until a signal arrives."""
    if not 0 <= args.port < 1 << 16:
        raise MeshwrightError(f"--port is {args.port}; it must be 0 to 65535, where 0 picks a free port")
    for name in ("kv_dtype", "weight_dtype"):
        if getattr(args, name) not in (None, "int8"):
            raise MeshwrightError(f"--{name.replace('_', '-')} is {getattr(args, name)!r}; it must be int8 or left out")
    for name in ("timeout", "grace"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise MeshwrightError(f"--{name} is {value}; it must be a number of seconds above 0")
    limits, api_keys = limits_and_keys(args)
    access = hosts_and_origins(args)
    if args.replicas != 1:
        return serve_replicas(args, limits, api_keys)
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import find_model
        from meshwright.execution.runtime.compile_cache import use_compile_cache
        from meshwright.execution.runtime.devices import claim_devices
        from meshwright.execution.training.run_directory.restart import is_first_process
        from meshwright.serving.engine.layout import ROWS
        from meshwright.serving.engine.request import ClosedError
        from meshwright.serving.engine.settings import EngineSettings

    plan = None if args.plan is None else read_decode_plan(args.plan)
    options = {name: value for name in PLAN_OPTIONS if (value := getattr(args, name)) is not None}
    if plan is not None and args.plan is not None:
        options |= options_of_plan(plan, args.plan, options)
    settings = EngineSettings(
        rows=options.get("rows"),
        context=options.get("context"),
        page_size=options.get("page_size", EngineSettings.page_size),
        cache_tokens=args.cache_tokens,
        cache_split=options.get("cache"),
        kv_dtype=options.get("kv_dtype"),
        weight_dtype=options.get("weight_dtype"),
        chunk_tokens=args.chunk,
        prefix_cache=not args.no_prefix_cache,
        num_drafts=(4 if args.draft_model else 0) if args.drafts is None else args.drafts,
        max_queue=args.max_queue,
    )
    found = find_model(
        args.model, adapter=args.adapter, **{name: options.get(name) for name in ("on", "mesh", "dtype")}
    )
    if plan is not None and args.plan is not None:
        check_model(plan, args.plan, found.model, args.model)
    http = _HttpOptions(
        args.host, args.port, args.grace, args.name or args.model.resolve().name, api_keys, access, limits
    )  # fmt: skip
    found_draft = None
    if args.draft_model is not None:
        found_draft = find_model(args.draft_model, on=found.system, mesh=found.mesh, dtype=options.get("dtype"))
    processes, compile_cache = args.process.processes, args.compile_cache
    check_all_read(args, "here")
    # The processes of one mesh compare these at the start.
    facts = {"model": asdict(found.model), "mesh": str(found.mesh), "dtype": found.dtype, "engine": asdict(settings)}
    facts["draft model"] = asdict(found_draft.model) if found_draft else None
    with waiting(f"starting {found.system}"):
        member = claim_devices(found.system, processes, facts)
        use_compile_cache(compile_cache)
    is_first = is_first_process()
    with report_end_to_others(member, ClosedError):
        on_note = note if is_first else lambda line: None
        if is_first and "mesh" not in options:
            note_advised_mesh(found, options.get("rows") or ROWS)
        model = read_with_bar(found, on_note)
        draft = read_with_bar(found_draft, on_note) if found_draft else None
        if is_first:
            _serve(model, draft, settings, http, member)
        else:
            _follow(model, draft, settings, member)
    return 0


class _HttpOptions(NamedTuple):
    """The HTTP options of a server."""

    host: str
    port: int
    grace_seconds: float
    model_name: str
    api_keys: tuple[ApiKey, ...]
    access: dict[str, Any]
    limits: Limits


def _serve(
    model: LoadedModel, draft: LoadedModel | None, settings: EngineSettings, http: _HttpOptions, member: Member | None
) -> None:
    """Serve until a signal arrives. With several processes this is the first, which sends its steps to the others.

    Args:
      model: the model on its devices.
      draft: the draft model, if there is one.
      settings: the settings of the engine.
      http: address, keys and limits.
      member: this process among those of the mesh; None for a single process.
    """
    import jax

    from meshwright.execution.processes.launch.replicas import REPLICA
    from meshwright.serving.engine.engine import Engine
    from meshwright.serving.engine.followers import Leader
    from meshwright.serving.http.server import serve_http
    from meshwright.serving.http.service import Service

    leader = Leader(member.host if member else None) if jax.process_count() > 1 else None
    engine = Engine(model, settings, draft)
    if leader:
        engine.runner.before_run = _counting_steps(leader.send, member)
    if member is None:
        engine.on_failure = lambda: service.fail(MeshwrightError(f"the engine has failed: {sys.exception()}"))
    else:  # If another process is lost, the host of the meeting reports it and ends this one too.
        engine.on_failure = member.crash
        member.is_idle = lambda: engine.is_idle
    _print_layout(engine)
    service = Service(
        engine=engine,
        model=http.model_name,
        context=engine.layout.context,
        tokenizer=model.tokenizer,
        limits=http.limits,
        api_keys=http.api_keys,
        **http.access,
        stats=engine.stats,
        means=engine.means,
    )
    if http.host not in ("127.0.0.1", "localhost", "::1") and not http.api_keys:
        note(f"anyone who can reach {http.host} can use this server; --api-keys FILE requires a key")

    has_started = threading.Event()

    def start() -> None:
        if REPLICA in os.environ:
            threading.Thread(target=_stop_without_front, args=(service,), daemon=True).start()
        if leader:
            leader.watch(lambda: service.on_stop())
        start_with_bar(engine)
        if member:
            member.step = 0
        has_started.set()

    try:
        serve_http(service, host=http.host, port=http.port, grace_seconds=http.grace_seconds, start=start)
        if engine.runner.num_compiling and member is None:
            # Every request has its answer; a program that is compiled may take minutes more.
            _print_served(engine)
            leave_at_once(0)
    finally:
        engine.close()
        if leader:
            leader.close()
    if not has_started.is_set() and member is None:
        # A signal came first. If Python ended while a thread compiles, XLA would abort.
        leave_at_once(0)
    _print_served(engine)


def _print_served(engine: Engine) -> None:
    """Print what an engine has done, and its measured and planned pace."""
    from meshwright.serving.engine.decode_stats import show_means

    stats = engine.stats()
    means = engine.means()
    pace = f": {show_means(*means)}" if means else ""
    print(f"served {stats.generated_tokens} tokens in {stats.num_steps} steps{pace}", file=sys.stderr)


def _follow(model: LoadedModel, draft: LoadedModel | None, settings: EngineSettings, member: Member | None) -> None:
    """Run the steps that the first process sends, until it ends."""
    from meshwright.serving.engine.followers import connect, follow, signals_passed_on
    from meshwright.serving.engine.layout import engine_layout
    from meshwright.serving.engine.runner import Runner

    with connect() as connection, signals_passed_on(connection):
        runner = Runner(model, *engine_layout(model, settings), settings, draft)
        runner.compile()
        if member:
            member.step = 0
        follow(connection, _counting_steps(runner.run, member))


def _counting_steps(run: Callable[[Work], object], member: Member | None) -> Callable[[Work], None]:
    """Wrap `run` to report the number of steps to the other processes, which notice one that is stuck."""

    def counting(work: Work) -> None:
        run(work)
        if member is not None:
            member.step = (member.step or 0) + 1

    return counting


def _stop_without_front(service: Service) -> None:
    """Stop a replica at the end of its standard input, which its front keeps open as long as the front runs."""
    sys.stdin.read()
    service.on_stop()


def _print_layout(engine: Engine) -> None:
    """Print the batch, context and KV cache of an engine; note if the context exceeds the trained sequence length."""
    layout = engine.layout
    at_once = show_count(layout.shards * layout.rows, "sequence")
    cache_tokens = engine.scheduler.num_pages * layout.page_size
    print(
        f"{engine.model.config.name} on {engine.model.system}, mesh {engine.model.mesh_shape}:"
        f" up to {at_once} at once, each of at most {layout.context} tokens;"
        f" a KV cache of {cache_tokens} tokens in pages of {layout.page_size}",
        file=sys.stderr,
    )
    longest = engine.model.seq_len
    if longest is not None and layout.context > longest:
        note(
            f"a context of {layout.context} tokens is longer than the {longest} that {engine.model.config.name}"
            " was trained with; what it makes beyond them is often wrong"
        )
