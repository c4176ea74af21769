"""`meshwright serve`: a model behind HTTP, for ordinary clients."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from meshwright.cli.arguments import option
from meshwright.cli.engine_start import start_with_bar
from meshwright.cli.loading import ModelArgs, note, read_with_bar
from meshwright.cli.serve_plan import check_model, planned_options, read_plan_to_serve
from meshwright.cli.several import ProcessArgs, devices_of_each, environments_of, telling_others
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.hardware import make_system
from meshwright.step import CacheSplit

if TYPE_CHECKING:
    from meshwright.inference import LoadedModel
    from meshwright.processes import Member
    from meshwright.serving.engine import Engine
    from meshwright.serving.http.limits import Limits
    from meshwright.serving.http.service import Service
    from meshwright.serving.runner import Work
    from meshwright.serving.settings import EngineSettings

EXAMPLES = (
    "meshwright serve Llama-3.2-1B-Instruct --on cpu:8 --mesh tp=8",
    "meshwright serve runs/tiny --port 0 --rows 8 --context 256",
    "meshwright serve Qwen3-8B --plan serve.yaml",
    "meshwright serve Qwen3-8B --on h100:8 --mesh tp=4 --replicas 2",
    "meshwright serve Qwen3-8B --on v5e:2x4 --mesh tp=8 --kv-dtype int8 --drafts 4",
)

KEYS = "MESHWRIGHT_API_KEYS"

PLANNED = ("on", "mesh", "dtype", "rows", "context", "page_size", "cache", "kv_dtype", "weight_dtype")
"""The options that a plan has too."""


@dataclass(frozen=True)
class Args(ModelArgs):
    """Answer requests over HTTP, many at once, as OpenAI's API, EasyLM's and LWM's have them."""

    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all of this machine. Default: 127.0.0.1."""
    port: Annotated[int, option("N")] = 8000
    """The port; 0 picks a free one. Default: 8000."""
    name: Annotated[str | None, option("NAME")] = None
    """What clients call the model. Default: the name of its directory."""
    plan: Annotated[Path | None, option("FILE")] = None
    """A serving plan (plan --serve decode -o FILE), for --on, --mesh, --rows, --context, --cache and dtypes."""
    rows: Annotated[int | None, option("N")] = None
    """The most texts that are made at once, over all devices. Default: 64."""
    context: Annotated[int | None, option("N")] = None
    """The most tokens of a text with its prompt. Default: what the model was trained on, at most 4096."""
    cache_tokens: Annotated[int | None, option("N")] = None
    """The tokens that the KV cache has room for. Default: what memory allows, at most rows times context."""
    page_size: Annotated[int | None, option("N")] = None
    """The tokens of a page of the cache. Default: 16."""
    cache: Annotated[CacheSplit | None, option("heads|batch|sequence")] = None
    """What fsdp and sp split of the cache, beside the heads that tp splits. Default: batch, its texts."""
    kv_dtype: Annotated[str | None, option("int8")] = None
    """Keep keys and values in int8, with a scale of each token and head. Default: the dtype of products."""
    weight_dtype: Annotated[str | None, option("int8")] = None
    """Keep the weights of layers in int8, with a scale of each column. Default: the dtype of products."""
    chunk: Annotated[int, option("N")] = 1024
    """The most tokens of prompts that are read between two steps of decoding. Default: 1024."""
    no_prefix_cache: Annotated[bool, option()] = False
    """Do not keep the pages of prompts for others that begin alike."""
    drafts: Annotated[int | None, option("N")] = None
    """Guess N tokens in each step, from what the text had before, and check them. Default: 0; 4 by a model."""
    draft_model: Annotated[Path | None, option("DIR|RUN")] = None
    """A smaller model with the same vocabulary that makes these guesses. Default: none."""
    max_queue: Annotated[int, option("N")] = 1024
    """The requests that wait at most; others get 429. Default: 1024."""
    timeout: Annotated[float, option("SECONDS")] = 600.0
    """The time that a request may take. Default: 600."""
    grace: Annotated[float, option("SECONDS")] = 30.0
    """The time that requests have to finish after SIGTERM. Default: 30."""
    api_keys: Annotated[Path | None, option("FILE")] = None
    """A file with a key a line, of which each request has one; or MESHWRIGHT_API_KEYS, with commas. Default: none."""
    cors: Annotated[tuple[str, ...], option("ORIGIN…")] = ()
    """Pages of these origins may call; * for all. Default: none."""
    replicas: Annotated[int, option("N")] = 1
    """Servers of the model behind one port, which share the devices; --mesh is of each. Default: 1."""
    process: ProcessArgs = field(default_factory=ProcessArgs)


def run(args: Args) -> int:
    """Serve until a signal."""
    if not 0 <= args.port < 1 << 16:
        raise MeshwrightError(f"--port is {args.port}; it is 0 to 65535, where 0 picks a free one")
    for name in ("kv_dtype", "weight_dtype"):
        if getattr(args, name) not in (None, "int8"):
            raise MeshwrightError(f"--{name.replace('_', '-')} is {getattr(args, name)!r}; it is int8, or left out")
    for name in ("timeout", "grace"):
        if not 0 < getattr(args, name) < float("inf"):
            raise MeshwrightError(f"--{name} is {getattr(args, name)}; it is a number of seconds above 0")
    keys = _keys(args.api_keys)
    if args.replicas != 1:
        if args.plan is not None:
            raise MeshwrightError(
                f"--plan {args.plan} is of one server; leave it out beside --replicas, and say --mesh"
            )
        return _serve_replicas(args, keys)
    with waiting("loading JAX"):
        from meshwright.loading import find_model
        from meshwright.runtime import claim_devices
        from meshwright.serving.http.limits import Limits
        from meshwright.serving.request import ClosedError
        from meshwright.serving.settings import EngineSettings
        from meshwright.training import is_first_process

    plan = None if args.plan is None else read_plan_to_serve(args.plan)
    options = {name: value for name in PLANNED if (value := getattr(args, name)) is not None}
    if plan is not None and args.plan is not None:
        options |= planned_options(plan, args.plan, options)
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
    address = _Address(args.host, args.port, args.grace, args.name or args.model.resolve().name, keys, args.cors)
    guesser = None
    if args.draft_model is not None:
        guesser = find_model(args.draft_model, on=found.system, mesh=found.mesh, dtype=options.get("dtype"))
    limits = Limits(seconds=args.timeout)
    processes = args.process.processes
    check_all_read(args, "here")
    facts = {"model": asdict(found.model), "mesh": str(found.mesh), "dtype": found.dtype, "engine": asdict(settings)}
    facts["draft model"] = asdict(guesser.model) if guesser else None
    with waiting(f"starting {found.system}"):
        several = claim_devices(found.system, processes, facts)
    is_first = is_first_process()
    with telling_others(several, ClosedError):
        on_note = note if is_first else lambda line: None
        model = read_with_bar(found, on_note)
        draft = read_with_bar(guesser, on_note) if guesser else None
        if is_first:
            _serve(model, draft, settings, limits, address, several)
        else:
            _follow(model, draft, settings, several)
    return 0


def _serve_replicas(args: Args, keys: tuple[str, ...]) -> int:
    """Serve by several processes, each with a part of the devices and a copy of the weights, behind one port."""
    with waiting("loading JAX"):
        from meshwright.launch import Replicas
        from meshwright.loading import find_model
        from meshwright.serving.front.app import Front
        from meshwright.serving.http.limits import Limits
        from meshwright.serving.http.run import HttpServer, serve_app
        from meshwright.serving.http.service import ServerState

    # Of the devices that all have together; the mesh is one of their parts, which each replica checks.
    whole = find_model(args.model, on=args.on, dtype=args.dtype, adapter=args.adapter).system
    number, grace = args.replicas, args.grace
    each = devices_of_each(
        whole, number, "replicas", "leave --replicas {0} out, and have dp={0} in --mesh for as many copies"
    )
    system = make_system(whole.chip, (each,))
    key = secrets.token_hex(16)
    environments = [dict(more) | {KEYS: key} for more in environments_of(whole, each, number)]
    state = ServerState(limits=Limits(seconds=args.timeout), api_keys=keys, cors_origins=args.cors)
    host, port = args.host, args.port
    words = ["serve", str(args.model), *_words_of_replica(args), "--on", str(system), "--port", "0"]
    check_all_read(args, "beside --replicas")
    replicas = Replicas(words, environments, say=lambda line: print(line, file=sys.stderr, flush=True))
    try:
        front = Front(state, replicas.all, key)
        serve_app(
            HttpServer(
                state, front.app(), front.fail, host=host, port=port, grace_seconds=grace, start=replicas.wait,
                announce=lambda line: print(line, flush=True),
            )
        )  # fmt: skip
    finally:
        replicas.stop(grace)
    return 0


def _words_of_replica(args: Args) -> list[str]:
    """The options that a replica has as its front was given them."""
    own, words = {"model", "on", "host", "port", "api_keys", "cors", "replicas", "process"}, list[str]()
    for option_ in fields(args):
        if option_.name not in own and (value := getattr(args, option_.name)) not in (option_.default, None):
            name = f"--{option_.name.replace('_', '-')}"
            words += [name] if value is True else [name, str(value)]
    if args.name is None:
        words += ["--name", args.model.resolve().name]
    return words


class _Address(NamedTuple):
    """Where a server listens, for how long it drains, what it is called, and who may ask."""

    host: str
    port: int
    grace_seconds: float
    name: str
    keys: tuple[str, ...]
    cors: tuple[str, ...]


def _serve(
    model: LoadedModel,
    draft: LoadedModel | None,
    settings: EngineSettings,
    limits: Limits,
    address: _Address,
    several: Member | None,
) -> None:
    """Serve until a signal; with several processes as their first."""
    import jax

    from meshwright.launch import REPLICA
    from meshwright.serving.decode_stats import show_means
    from meshwright.serving.engine import Engine
    from meshwright.serving.followers import Leader
    from meshwright.serving.http.run import serve_http
    from meshwright.serving.http.service import Service

    leader = Leader(several.host if several else None) if jax.process_count() > 1 else None
    engine = Engine(model, settings, draft)
    if leader:
        engine.runner.before_run = _counted(leader.send, several)
    if several is None:
        engine.on_failure = lambda: service.fail(MeshwrightError(f"the engine has failed: {sys.exception()}"))
    else:  # Where another process is lost, who hosts the meeting says so, and ends this one too.
        engine.on_failure = several.crash
        several.is_idle = lambda: engine.is_idle
    _say_layout(engine)
    service = Service(
        engine=engine,
        model=address.name,
        context=engine.layout.context,
        tokenizer=model.tokenizer,
        limits=limits,
        api_keys=address.keys,
        cors_origins=address.cors,
        stats=engine.stats,
        means=engine.means,
    )
    if address.host not in ("127.0.0.1", "localhost", "::1") and not address.keys:
        note(f"anybody who reaches {address.host} can ask; --api-keys FILE lets in those with a key")

    def start() -> None:
        if REPLICA in os.environ:
            threading.Thread(target=_stop_without_front, args=(service,), daemon=True).start()
        if leader:
            leader.watch(lambda: service.on_stop())
        start_with_bar(engine)
        if several:
            several.step = 0

    try:
        serve_http(service, host=address.host, port=address.port, grace_seconds=address.grace_seconds, start=start)
    finally:
        engine.close()
        if leader:
            leader.close()
    stats = engine.stats()
    both = engine.means()
    pace = f": {show_means(*both)}" if both else ""
    print(f"served {stats.generated_tokens} tokens in {stats.num_steps} steps{pace}", file=sys.stderr)


def _stop_without_front(service: Service) -> None:
    """Stop a replica whose standard input ends, as it does when its front has died."""
    sys.stdin.read()
    service.on_stop()


def _counted(run: Callable[[Work], object], several: Member | None) -> Callable[[Work], None]:
    """Run a step, and say to the other processes that it is taken."""

    def counted(work: Work) -> None:
        run(work)
        if several is not None:
            several.step = (several.step or 0) + 1

    return counted


def _follow(model: LoadedModel, draft: LoadedModel | None, settings: EngineSettings, several: Member | None) -> None:
    """Run the steps that the first process sends, until it ends."""
    from meshwright.serving.followers import connect, follow, signals_passed_on
    from meshwright.serving.layout import engine_layout
    from meshwright.serving.runner import Runner

    with connect() as connection, signals_passed_on(connection):
        runner = Runner(model, *engine_layout(model, settings), settings, draft)
        runner.compile()
        if several:
            several.step = 0
        follow(connection, _counted(runner.run, several))


def _keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file, or else of the environment."""
    if path is None:
        return tuple(key for key in os.environ.get(KEYS, "").split(",") if key)
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(f"cannot read --api-keys {path}: {error}") from None
    if not keys:
        raise MeshwrightError(f"--api-keys {path} has no key; it has one a line")
    return keys


def _say_layout(engine: Engine) -> None:
    """What the engine has."""
    layout = engine.layout
    room = engine.scheduler.num_pages * layout.page_size
    print(
        f"{engine.model.config.name} on {engine.model.system}, mesh {engine.model.mesh_shape}:"
        f" {layout.shards * layout.rows} texts at once, each of at most {layout.context} tokens;"
        f" a cache of {room} tokens in pages of {layout.page_size}",
        file=sys.stderr,
    )
