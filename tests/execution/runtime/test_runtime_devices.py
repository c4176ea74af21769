"""What a command does to its process before it simulates devices."""

import os
import subprocess
import sys

import pytest

from meshwright.description.hardware.system import parse_system
from meshwright.execution.runtime.devices import claim_devices

FAULTS_OF_THE_SECOND_TIME = """
import ctypes, resource, threading
from meshwright.execution.runtime.devices import _keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def use():
    both = [ctypes.c_void_p(libc.malloc(48 << 20)) for _ in range(2)]
    for memory in both:
        libc.memset(memory, 1, 48 << 20)
    for memory in both:
        libc.free(memory)

def use_twice():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

{setting}
{run}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the malloc of glibc is Linux's")
@pytest.mark.parametrize(("setting", "is_kept"), [("_keep_freed_memory()", True), ("", False)])
@pytest.mark.parametrize("run", ["use_twice()", "threading.Thread(target=use_twice).start()"])
def test_freed_memory_is_kept_for_what_is_allocated_next(run, setting, is_kept):
    program = FAULTS_OF_THE_SECOND_TIME.format(setting=setting, run=run)
    faults = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)
    assert (faults < 100) is is_kept


def test_claims_of_one_process_do_not_grow_its_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4")
    lengths = []
    for count in (8, 2, 8, 2, 8, 2):
        claim_devices(parse_system(f"cpu:{count}"))
        assert os.environ["XLA_FLAGS"].endswith(f"--xla_force_host_platform_device_count={count}")
        lengths.append(len(os.environ["XLA_FLAGS"]))
    assert "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]
    assert lengths[1:] == [lengths[1]] * 5
