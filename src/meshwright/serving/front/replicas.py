"""Several server processes on this machine, each with a part of the devices, behind a proxy on one port."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import fields

from meshwright.description.hardware.system import make_system
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.library import find_model
from meshwright.execution.processes.launch.division import devices_per_process, process_environments
from meshwright.execution.processes.launch.replicas import Replicas
from meshwright.options.serving import ServeArgs, split_adapters
from meshwright.serving.front.app import Front
from meshwright.serving.http.api_keys import KEYS_VARIABLE
from meshwright.serving.http.server import HttpServer, serve_app
from meshwright.serving.http.service import ServerState

FRONT_OPTIONS = {"model", "on", "host", "port", "cors", "allowed_host", "replicas"}
"""Options that the proxy handles itself and does not pass to its replicas."""


def serve_replicas(
    args: ServeArgs, state: ServerState, *, on_ready: Callable[[str], None], on_line: Callable[[str], None]
) -> None:
    """Serve with several processes, each with a part of the devices and a copy of the weights, behind one port.

    Args:
        args: the options of `meshwright serve`.
        state: limits, API keys and hosts of the proxy.
        on_ready: as in `serve_http`.
        on_line: called, in threads, with lines about replicas and from their stderr.

    Raises:
        MeshwrightError: an option cannot be used with several replicas, or the devices cannot be divided among them.
    """
    if args.plan is not None:
        raise MeshwrightError(f"--plan {args.plan} is of one server; with --replicas leave it out, and give --mesh")
    if args.adapter_folder is not None:
        raise MeshwrightError(
            f"--adapter-folder {args.adapter_folder} loads adapters into one server; leave it or --replicas out"
        )
    # `system` has the devices of all replicas. `--mesh` is the mesh of one replica, which checks it.
    system = find_model(args.model, on=args.on, dtype=args.dtype, adapter=split_adapters(args.adapter)[0]).system
    num_devices = devices_per_process(
        system, args.replicas, "replicas", "leave --replicas {0} out, and have dp={0} in --mesh for as many copies"
    )
    replica_key = secrets.token_hex(16)
    # Replicas have the clients' keys too, by --api-keys or the environment, so that each applies their limits.
    keys = ",".join(filter(None, (replica_key, os.environ.get(KEYS_VARIABLE))))
    environments = [
        dict(environment) | {KEYS_VARIABLE: keys}
        for environment in process_environments(system, num_devices, args.replicas)
    ]
    replica_system = str(make_system(system.chip, (num_devices,)))
    words = list[str]()
    for field in fields(args):
        if field.name not in FRONT_OPTIONS and (value := getattr(args, field.name)) not in (field.default, None):
            name = f"--{field.name.replace('_', '-')}"
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [name, *map(str, values)]
    if args.name is None:
        words += ["--name", args.model.resolve().name]
    command = ["serve", str(args.model), *words, "--on", replica_system, "--port", "0"]
    replicas = Replicas(command, environments, say=on_line)
    try:
        front = Front(state, replicas.all, replica_key)
        serve_app(
            HttpServer(
                state, front.app(), front.fail, host=args.host, port=args.port, grace_seconds=args.grace,
                start=replicas.wait, on_ready=on_ready, close=front.close,
            )
        )  # fmt: skip
    finally:
        replicas.stop(args.grace)
