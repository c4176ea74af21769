"""`meshwright serve --replicas`: several server processes on this machine, and a front before them on one port."""

from __future__ import annotations

import secrets
import sys
from dataclasses import fields

from meshwright.cli.processes import devices_per_process, process_environments
from meshwright.cli.serve.args import KEYS_VARIABLE, Args
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.errors import MeshwrightError
from meshwright.hardware import make_system

FRONT_OPTIONS = {"model", "on", "host", "port", "api_keys", "cors", "replicas", "process"}
"""Options that the front handles itself and does not pass to its replicas."""


def serve_replicas(args: Args, api_keys: tuple[str, ...]) -> int:
    """Serve by several processes, each with a part of the devices and a copy of the weights, behind one port."""
    if args.plan is not None:
        raise MeshwrightError(f"--plan {args.plan} is of one server; with --replicas leave it out, and give --mesh")
    with waiting("loading JAX"):
        from meshwright.launch import Replicas
        from meshwright.loading import find_model
        from meshwright.serving.front.app import Front
        from meshwright.serving.http.server import HttpServer, serve_app
        from meshwright.serving.http.service import Limits, ServerState

    # All devices together. The mesh is of one replica, which checks it.
    system = find_model(args.model, on=args.on, dtype=args.dtype, adapter=args.adapter).system
    num_replicas, grace = args.replicas, args.grace
    num_devices = devices_per_process(
        system, num_replicas, "replicas", "leave --replicas {0} out, and have dp={0} in --mesh for as many copies"
    )
    replica_key = secrets.token_hex(16)
    environments = [
        dict(environment) | {KEYS_VARIABLE: replica_key}
        for environment in process_environments(system, num_devices, num_replicas)
    ]
    state = ServerState(limits=Limits(seconds=args.timeout), api_keys=api_keys, cors_origins=args.cors)
    host, port = args.host, args.port
    replica_system = str(make_system(system.chip, (num_devices,)))
    command = ["serve", str(args.model), *_replica_options(args), "--on", replica_system, "--port", "0"]
    check_all_read(args, "beside --replicas")
    replicas = Replicas(command, environments, say=lambda line: print(line, file=sys.stderr, flush=True))
    try:
        front = Front(state, replicas.all, replica_key)
        serve_app(
            HttpServer(
                state, front.app(), front.fail, host=host, port=port, grace_seconds=grace, start=replicas.wait,
                announce=lambda line: print(line, flush=True),
            )
        )  # fmt: skip
    finally:
        replicas.stop(grace)
    return 0


def _replica_options(args: Args) -> list[str]:
    """The options that are passed on to each replica, as words of a command line."""
    words = list[str]()
    for field in fields(args):
        if field.name not in FRONT_OPTIONS and (value := getattr(args, field.name)) not in (field.default, None):
            name = f"--{field.name.replace('_', '-')}"
            words += [name] if value is True else [name, str(value)]
    if args.name is None:
        words += ["--name", args.model.resolve().name]
    return words
