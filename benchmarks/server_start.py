"""The start of a server with an empty and with a full compilation cache: programs compiled, CPU seconds, seconds.

    python benchmarks/server_start.py
    python benchmarks/server_start.py --devices 8 --mesh tp=8 --layers 8

Each start is a process of its own. "compiled" counts the programs that the compiler made, by events of JAX, until the
server was ready and until all of its programs were there; "loaded" those that came from the cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path


def start(cache: str, devices: int, mesh: str, layers: int) -> None:
    """Start an engine with the defaults of `meshwright serve`, and print what that took as JSON."""
    import jax

    from meshwright.description.families.registry import PRESETS
    from meshwright.description.hardware.system import parse_system
    from meshwright.description.step.parameter_tree import parameters
    from meshwright.execution.models.inference.loaded import LoadedModel
    from meshwright.execution.runtime.arrays import initialise
    from meshwright.execution.runtime.compile_cache import use_compile_cache
    from meshwright.execution.runtime.devices import claim_devices
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.execution.runtime.sharding_context import ShardingContext
    from meshwright.execution.text.tokenizer import byte_tokenizer
    from meshwright.mesh import parse_mesh
    from meshwright.serving.engine.engine import Engine

    system = parse_system(f"cpu:{devices}")
    claim_devices(system)
    config, shape = replace(PRESETS["tiny"], num_layers=layers), parse_mesh(mesh, num_devices=devices)
    placed = build_mesh(shape, jax.devices()[:devices])
    with jax.set_mesh(placed):
        params = initialise(parameters(config), jax.random.key(0), placed, ShardingContext(shape), "f32")
    model = LoadedModel(
        config=config, params=params, mesh=placed, mesh_shape=shape, system=system, dtype="f32", stored_dtype="f32",
        tokenizer=byte_tokenizer(), source={}, seq_len=4096,
    )  # fmt: skip
    events = Counter[str]()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
    use_compile_cache(cache)
    seconds, cpu = time.perf_counter(), time.process_time()
    engine = Engine(model)

    def figures() -> dict[str, float]:
        return {
            "compiled": events["cache_misses"],
            "loaded": events["cache_hits"],
            "cpu_seconds": time.process_time() - cpu,
            "seconds": time.perf_counter() - seconds,
        }

    engine.start()
    ready = figures()
    engine.runner.wait_compiled()
    print(json.dumps({"ready": ready, "all": figures()}))
    engine.close()


def main() -> None:
    """Start twice, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--mesh", default="dp=1")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start(args.start, args.devices, args.mesh, args.layers)
        return
    print(f"tiny with {args.layers} layers on cpu:{args.devices}, {args.mesh}")
    print(f"{'':24}{'compiled':>10}{'loaded':>10}{'CPU-s':>10}{'s':>10}")
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--start", cache]
            done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for until, own in done.items():
                print(
                    f"{name + ', ' + ('ready' if until == 'ready' else 'all programs'):24}{own['compiled']:10}"
                    f"{own['loaded']:10}{own['cpu_seconds']:10.1f}{own['seconds']:10.1f}"
                )


if __name__ == "__main__":
    main()
