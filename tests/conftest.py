"""Every test sees 8 simulated CPU devices; no test may find a real accelerator."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Level 0 spares LLVM's optimization, two thirds of a small program's compile time, and the plain loop emitters most of
# what is left; code generated in one part takes an eighth less than in parts for many cores. XLA's own passes all run.
# Later jaxlibs have no such emitters, and end over a flag that they do not know.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith("0.10.")
        else "",
    )
)
# Two test processes may each load the TPU compiler.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import pytest

# Started here, before a command under test can ask for another number of devices.
assert len(jax.devices()) == 8

# A mix of dtypes or of ranks is written out in the source as a cast or a broadcast, so that none is made by mistake.
# Set here and not in the environment: child processes run as a user's do.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects of which few are garbage: looked for less often, a twelfth of the time is spared.
gc.freeze()
gc.set_threshold(100_000, 20, 100)
# Of each op the line alone, without those that called it: a twentieth.
FRAMES = jax.config.jax_traceback_in_locations_limit  # type: ignore
jax.config.update("jax_traceback_in_locations_limit", 1)

# The caches of tokens and of compiled programs are this session's own, and those of its child processes; workers of
# xdist begin with the environment of the process that starts them.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    # All results are sent by then, and to take down what thousands of programs hold would take 10 s.
    atexit.register(os._exit, 0)
else:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright_tests_")

# Runs, servers and loaded models of many tests take the same steps: each is compiled once a session. Names of ops are
# in the key, since tests read them. Set here and not in the environment: child processes have caches as users do.
jax.config.update("jax_compilation_cache_dir", f"{os.environ['XDG_CACHE_HOME']}/steps")
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_unconfigure() -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def listed(name: str) -> frozenset[str]:
    """The tests, and the cases of tests, that a list names."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return frozenset(f"tests/{line}" for line in lines if not line.startswith("#"))


LISTS = {"matrix": listed("matrix.txt"), "exhaustive": listed("exhaustive.txt")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is too slow for `make test`, or for `make matrix` too, before `-m` chooses."""
    if config.args == config.getini("testpaths"):
        there = {name for item in items for name in (item.nodeid, item.nodeid.split("[")[0])}
        if gone := sorted(name for names in LISTS.values() for name in names - there):
            raise pytest.UsageError(f"tests/matrix.txt or exhaustive.txt names what is no test: {', '.join(gone)}")
    for item in items:
        for mark, names in LISTS.items():
            if item.nodeid in names or item.nodeid.split("[")[0] in names:
                item.add_marker(mark)
    # Documents, trials of faults and the site take up to half a minute: first, so that at the end no worker waits long.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


FOREIGN = ("hlo", "inspection")
"""The tests of programs that are inspected: they are other people's, which mix dtypes and ranks as JAX allows."""


@pytest.fixture(autouse=True)
def foreign_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.parent.name not in FOREIGN:
        yield
        return
    jax.config.update("jax_traceback_in_locations_limit", FRAMES)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_traceback_in_locations_limit", 1)
