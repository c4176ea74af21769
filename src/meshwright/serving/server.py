"""Serve a model over HTTP, in one process or as one of several processes of a mesh."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.description.families.adapters import read_adapter_config
from meshwright.description.step.lora import EMBEDDING, MAX_RANK, MAX_SLOTS, UNEMBEDDING
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.serving import NARROW
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.advice import advised_mesh
from meshwright.execution.loading.library import Found, find_model
from meshwright.execution.models.inference.loaded import LoadedModel
from meshwright.execution.processes.launch.replicas import REPLICA
from meshwright.execution.processes.member import Member, leave_at_once, report_end_to_others
from meshwright.execution.processes.options import Processes
from meshwright.execution.runtime.compile_cache import use_compile_cache
from meshwright.execution.runtime.devices import claim_devices
from meshwright.execution.training.run_directory.checkpoint import Note
from meshwright.execution.training.run_directory.restart import is_first_process
from meshwright.options.serving import ServeArgs, split_adapters
from meshwright.serving.engine.adapters import SlotWeights
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.followers import Leader, connect, follow, signals_passed_on
from meshwright.serving.engine.layout import ROWS, engine_layout
from meshwright.serving.engine.request import ClosedError
from meshwright.serving.engine.runner import Runner, Work
from meshwright.serving.engine.settings import EngineSettings
from meshwright.serving.front.replicas import serve_replicas
from meshwright.serving.http.adapters import ServedAdapters
from meshwright.serving.http.api_keys import limits_and_keys
from meshwright.serving.http.hosts import check_cors, check_hosts
from meshwright.serving.http.server import serve_http
from meshwright.serving.http.service import ServerState, Service
from meshwright.serving.plan import check_model, options_of_plan, read_decode_plan

PLAN_OPTIONS = (
    "on", "mesh", "dtype", "batch", "context", "page_size", "cache", "kv_dtype", "weight_dtype", "adapter_slots",
    "adapter_rank",
)  # fmt: skip
"""Options that a serving plan can set."""


class ServerProgress:
    """Callbacks of a server as it starts and ends. This class is silent, except for notes, which become warnings.

    Args:
        on_ready: called with the URL, in a thread, once requests are answered.
    """

    ends_process = False
    """Whether the process exits at once although a thread still compiles, which may take minutes."""

    def __init__(self, on_ready: Callable[[str], None]) -> None:
        self.ready = on_ready

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that surrounds slow work, which `what` names."""
        return nullcontext()

    def note(self, line: str) -> None:
        """Report a note to the user."""
        warnings.warn(line, stacklevel=2)

    def replica(self, line: str) -> None:
        """Report a line about a replica, or from its stderr, to the user."""
        self.note(line)

    def read(self, found: Found, on_note: Note) -> LoadedModel:
        """Load a model with its weights. on_note: called with notes for the user."""
        return found.load(on_note=on_note)

    def engine_made(self, engine: Engine) -> None:
        """Called with the engine before it starts."""

    def start(self, engine: Engine) -> None:
        """Compile the programs of an engine and start it."""
        engine.start()

    def ended(self, engine: Engine) -> None:
        """Called with the engine after its last answer."""


def run_server(args: ServeArgs, processes: Processes, progress: ServerProgress) -> None:
    """Serve until a signal arrives. A process other than the first of its mesh serves until the first one ends."""
    if type(args.replicas) is not int:
        raise MeshwrightError(f"--replicas is {args.replicas!r}; it must be a whole number from 1")
    if type(args.port) is not int or not 0 <= args.port < 1 << 16:
        raise MeshwrightError(f"--port is {args.port!r}; it must be 0 to 65535, where 0 picks a free port")
    for name, narrow in NARROW.items():
        value = getattr(args, name)
        if value is not None and value not in narrow:
            raise MeshwrightError(
                f"--{name.replace('_', '-')} is {value!r}; it must be {' or '.join(narrow)}, or left out"
            )
    for name in ("timeout", "grace"):
        value = getattr(args, name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise MeshwrightError(f"--{name} is {value!r}; it must be a number of seconds above 0")
    limits, keys = limits_and_keys(args)
    hosts, origins = check_hosts(args.allowed_host), check_cors(args.cors)
    state = {"limits": limits, "api_keys": keys, "allowed_hosts": hosts, "cors_origins": origins}
    if args.replicas != 1:
        serve_replicas(args, ServerState(**state), on_ready=progress.ready, on_line=progress.replica)
        return
    found, draft, settings = _find_models(args)
    # The processes of one mesh compare these at the start.
    facts = {"model": asdict(found.model), "mesh": str(found.mesh), "dtype": found.dtype, "engine": asdict(settings)}
    facts["draft model"] = asdict(draft.model) if draft else None
    with progress.waiting(f"starting {found.system}"):
        member = claim_devices(found.system, processes, facts)
        use_compile_cache(None if args.compile_cache is None else str(args.compile_cache))
    is_first = is_first_process()
    with report_end_to_others(member, ClosedError):
        on_note = progress.note if is_first else lambda line: None
        has_mesh = args.mesh is not None or args.plan is not None
        if is_first and not has_mesh and (line := advised_mesh(found, settings.rows or ROWS)):
            progress.note(line)
        model = progress.read(found, on_note)
        draft_model = progress.read(draft, on_note) if draft else None
        if is_first:
            # Followers connect to the leader before they create a runner, and `Engine` may wait for their runners.
            leader = Leader(member.host if member else None) if jax.process_count() > 1 else None
            _serve(Engine(model, settings, draft_model), leader, args, state, member, progress)
        else:
            _follow(model, draft_model, settings, member)


def _find_models(args: ServeArgs) -> tuple[Found, Found | None, EngineSettings]:
    """Return the model, the draft model or None, and the engine's settings, from the options and their serving plan."""
    plan = None if args.plan is None else read_decode_plan(args.plan)
    options = {name: value for name in PLAN_OPTIONS if (value := getattr(args, name)) is not None}
    if plan is not None and args.plan is not None:
        options |= options_of_plan(plan, args.plan, options)
    settings = EngineSettings(
        rows=options.get("batch"),
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
    target = {name: options.get(name) for name in ("on", "mesh", "dtype")}
    merged, named = split_adapters(args.adapter)
    found = find_model(args.model, adapter=merged, weight_dtype=settings.weight_dtype, **target)
    if plan is not None and args.plan is not None:
        check_model(plan, args.plan, found.model, args.model)
    settings = replace(settings, **_slots(args, options, named, found.model))
    if args.draft_model is None:
        return found, None, settings
    return found, find_model(args.draft_model, on=found.system, mesh=found.mesh, dtype=target["dtype"]), settings


def _slots(
    args: ServeArgs, options: Mapping[str, Any], named: Mapping[str, Path], model: ModelConfig
) -> dict[str, Any]:
    """Return the adapter fields of `EngineSettings`: adapter_slots, adapter_rank and adapter_ends.

    Args:
        args: the options.
        options: the options of `PLAN_OPTIONS` that are set, including those set by a plan.
        named: the directories of the adapters to load at the start, by name.
    """
    slots = options.get("adapter_slots", len(named))
    adapters = [read_adapter_config(path, model) for path in named.values()]
    rank = options.get("adapter_rank", max((each.rank for each in adapters), default=EngineSettings.adapter_rank))
    ends = tuple(end for end in (EMBEDDING, UNEMBEDDING) if any(end in each.targets for each in adapters))
    for name, value, most in (("slots", slots, MAX_SLOTS), ("rank", rank, MAX_RANK)):
        if not 1 <= value <= most and (name, value) != ("slots", 0):
            raise MeshwrightError(f"--adapter-{name} is {value}; it must be a whole number from 1 to {most:,}")
    if len(named) > slots:
        raise MeshwrightError(f"--adapter-slots is {slots}, and --adapter names {len(named)}; use at least these")
    if not slots and (args.adapter_folder is not None or "adapter_rank" in options):
        what = "--adapter-folder" if args.adapter_folder is not None else "--adapter-rank"
        raise MeshwrightError(f"{what} is given, and there are no slots for adapters; add --adapter-slots, as 4")
    if args.adapter_folder is not None and not args.adapter_folder.is_dir():
        raise MeshwrightError(f"--adapter-folder {args.adapter_folder} is no directory")
    return {"adapter_slots": slots, "adapter_rank": rank, "adapter_ends": ends}


def _serve(
    engine: Engine,
    leader: Leader | None,
    args: ServeArgs,
    state: Mapping[str, Any],
    member: Member | None,
    progress: ServerProgress,
) -> None:
    """Serve until a signal arrives. Runs in the first process of a mesh, which sends its steps to the others.

    Args:
        engine: the engine, which has not started.
        leader: sends the steps to the other processes; None for a single process.
        args: the options.
        state: fields of `ServerState`: limits, API keys, hosts and origins.
        member: this process's connection to the other processes of the mesh; None for a single process.
        progress: called at the start and the end.
    """
    if leader:
        engine.runner.before_run = _counting_steps(leader.send, member)
    if member is None:
        engine.on_failure = lambda: service.fail(MeshwrightError(f"the engine has failed: {sys.exception()}"))
    else:  # If another process is lost, `processes/` reports it and ends this one too.
        engine.on_failure = member.crash
        member.is_idle = lambda: engine.is_idle
    progress.engine_made(engine)
    # Read before the programs are compiled, so that a wrong adapter ends the server at once.
    factors = {name: engine.adapters.read(name, path) for name, path in split_adapters(args.adapter)[1].items()}
    service = _service(engine, args, state, progress)
    has_started, is_done = threading.Event(), threading.Event()

    def start() -> None:
        if REPLICA in os.environ:
            threading.Thread(target=_stop_without_front, args=(service,), daemon=True).start()
        if leader:
            leader.watch(lambda: service.on_stop())
        try:
            progress.start(engine)
            for name in list(factors):
                engine.load_adapter(name, factors.pop(name))
        finally:
            is_done.set()
        if member:
            member.step = 0
        has_started.set()

    try:
        serve_http(
            service,
            host=args.host,
            port=args.port,
            grace_seconds=args.grace,
            start=start,
            on_ready=progress.ready,
        )
        if progress.ends_process and engine.runner.num_compiling and member is None:
            # All requests are answered; a compilation in progress may take minutes more.
            progress.ended(engine)
            leave_at_once(0)
    finally:
        engine.close()
        if leader:
            leader.close()
    if not has_started.is_set() and member is None:
        # A signal arrived before the start completed. If Python exited while a thread compiles, XLA would abort.
        if progress.ends_process:
            leave_at_once(0)
        is_done.wait()
    progress.ended(engine)


def _service(engine: Engine, args: ServeArgs, state: Mapping[str, Any], progress: ServerProgress) -> Service:
    """Return what the HTTP server serves, after notes on its context and on who can reach it. state: as in `_serve`."""
    model, context = engine.model, engine.layout.context
    service = Service(
        engine=engine,
        model=args.name or args.model.resolve().name,
        context=context,
        tokenizer=model.tokenizer,
        stats=engine.stats,
        means=engine.means,
        adapters=ServedAdapters(engine, args.adapter_folder),
        **state,
    )
    if model.seq_len is not None and context > model.seq_len:
        progress.note(
            f"a context of {context} tokens is longer than the {model.seq_len} that {model.config.name}"
            " was trained with; what it makes beyond them is often wrong"
        )
    if args.host not in ("127.0.0.1", "localhost", "::1") and not service.api_keys:
        progress.note(f"anyone who can reach {args.host} can use this server; --api-keys FILE requires a key")
    return service


def _follow(model: LoadedModel, draft: LoadedModel | None, settings: EngineSettings, member: Member | None) -> None:
    """Run the steps that the first process of the mesh sends, until it ends."""
    with connect() as connection, signals_passed_on(connection):
        runner = Runner(model, *engine_layout(model, settings), settings, draft)
        runner.compile()
        if member:
            member.step = 0

        def run(work: Work | SlotWeights) -> None:
            runner.run(work) if isinstance(work, Work) else runner.load_adapter(work)

        follow(connection, _counting_steps(run, member))


def _counting_steps(
    run: Callable[[Work | SlotWeights], object], member: Member | None
) -> Callable[[Work | SlotWeights], None]:
    """Return `run`, made to count its calls in `member.step`, by which the other processes detect a stuck process."""

    def counting(work: Work | SlotWeights) -> None:
        run(work)
        if member is not None:
            member.step = (member.step or 0) + 1

    return counting


def _stop_without_front(service: Service) -> None:
    """Stop a replica when its standard input ends, because then the proxy in front of it has ended."""
    sys.stdin.read()
    service.on_stop()
