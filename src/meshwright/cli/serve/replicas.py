"""`meshwright serve --replicas`: several server processes on this machine, behind a front on one port."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from meshwright.cli.processes import devices_per_process, process_environments
from meshwright.cli.serve.args import KEYS_VARIABLE, Args, hosts_and_origins
from meshwright.cli.typed import check_all_read
from meshwright.cli.waiting import waiting
from meshwright.description.hardware.system import make_system
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.serving.http.service import ApiKey, Limits

FRONT_OPTIONS = {"model", "on", "host", "port", "cors", "allowed_host", "replicas", "process"}
"""Options that the front handles itself and does not pass to its replicas."""


def serve_replicas(args: Args, limits: Limits, api_keys: tuple[ApiKey, ...]) -> int:
    """Serve with several processes, each with a part of the devices and a copy of the weights, behind one port."""
    if args.plan is not None:
        raise MeshwrightError(f"--plan {args.plan} is of one server; with --replicas leave it out, and give --mesh")
    with waiting("loading JAX"):
        from meshwright.execution.loading.library import find_model
        from meshwright.execution.processes.launch.replicas import Replicas
        from meshwright.serving.front.app import Front
        from meshwright.serving.http.server import HttpServer, serve_app
        from meshwright.serving.http.service import ServerState

    # The system has all devices; the mesh is that of one replica, which checks it.
    system = find_model(args.model, on=args.on, dtype=args.dtype, adapter=args.adapter).system
    num_replicas, grace = args.replicas, args.grace
    num_devices = devices_per_process(
        system, num_replicas, "replicas", "leave --replicas {0} out, and have dp={0} in --mesh for as many copies"
    )
    replica_key = secrets.token_hex(16)
    # Replicas have the clients' keys too, by --api-keys or the environment, so that each applies their limits.
    keys = ",".join(filter(None, (replica_key, os.environ.get(KEYS_VARIABLE))))
    environments = [
        dict(environment) | {KEYS_VARIABLE: keys}
        for environment in process_environments(system, num_devices, num_replicas)
    ]
    state = ServerState(limits=limits, api_keys=api_keys, **hosts_and_origins(args))
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
                announce=lambda line: print(line, flush=True), close=front.close,
            )
        )  # fmt: skip
    finally:
        replicas.stop(grace)
    return 0


def _replica_options(args: Args) -> list[str]:
    """Return the options that are passed on to each replica, as words of a command line."""
    words = list[str]()
    for field in fields(args):
        if field.name not in FRONT_OPTIONS and (value := getattr(args, field.name)) not in (field.default, None):
            name = f"--{field.name.replace('_', '-')}"
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [name, *map(str, values)]
    if args.name is None:
        words += ["--name", args.model.resolve().name]
    return words
