"""The meeting of a run's processes, without JAX: who comes, what is compared, and how a lost one is named."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from meshwright.errors import MeshwrightError
from meshwright.execution.processes.compare import find_difference, flatten
from meshwright.execution.processes.launch.supervisor import free_ports
from meshwright.execution.processes.options import HOSTED, Processes, split_address
from meshwright.execution.processes.relay import Relay

MEMBER = """
import json, sys, time
from meshwright.errors import MeshwrightError, TemporaryError
from meshwright.execution.processes.options import Processes
from meshwright.execution.processes import host, member
from meshwright.execution.processes.member import join
said = json.loads(sys.argv[1])
for module in (host, member):
    module.SILENT_SECONDS = 2.0
host.BEHIND_SECONDS = 1.0
try:
    one = join(Processes(said["at"], said["of"], said["number"], said.get("wait", 5.0)), said.get("facts", {}))
except MeshwrightError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1 if isinstance(error, TemporaryError) else 2)
print("met", flush=True)
one.step = said.get("step")
if "idle" in said:
    one.is_idle = lambda: said["idle"]
if said.get("fails"):
    one.fail(said["fails"], 1)
time.sleep(said.get("seconds", 0.0))
one.leave()
"""

HOST = """
import sys, time
from meshwright.execution.processes.host import Host, listen
Host(
    listen("localhost", int(sys.argv[1])), 2, 5.0, on_end=lambda end: print(end.line, flush=True), on_note=print,
    stuck_seconds=1.0,
).start()
time.sleep(60)
"""


def start(port, number, environment=None, of=2, **more):
    """A process of a run."""
    said = json.dumps({"at": f"localhost:{port}", "of": of, "number": number} | more)
    return subprocess.Popen([sys.executable, "-c", MEMBER, said], env=environment, text=True, stdout=-1, stderr=-1)


def results(*processes):
    """The exit code and the last line on stderr of each process."""
    try:
        said = [process.communicate(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [err.strip() for _, err in said]
    assert all("\n" not in line for line in lines), lines
    return [(process.returncode, line) for process, line in zip(processes, lines, strict=True)]


def test_processes_meet_and_leave():
    port = free_ports()
    assert results(*(start(port, number, of=3, facts={"a": {"b": 1}}) for number in range(3))) == [(0, "")] * 3


def test_the_host_stays_until_the_others_are_done():
    port = free_ports()
    assert results(start(port, 0), start(port, 1, seconds=1.5)) == [(0, "")] * 2


def test_the_host_that_has_done_its_part_still_names_who_is_lost():
    port = free_ports()
    first, second = start(port, 0), start(port, 1, seconds=60)
    assert [process.stdout.readline() for process in (first, second)] == ["met\n"] * 2
    second.kill()
    [(code, line)] = results(first)
    second.communicate()
    assert code == 1
    assert "error: process 1 (" in line
    assert "has died" in line


def test_another_setting_is_named_on_one_process():
    port = free_ports()
    facts = [{"workload": {"batch": 8, "seq_len": 64}}, {"workload": {"batch": 16, "seq_len": 64}}]
    (code, line), other = results(*(start(port, number, facts=facts[number]) for number in range(2)))
    assert code == 2
    assert line == (
        "error: process 1 has workload.batch 16, and process 0 has 8; all processes of a run need the same arguments,"
        " files and versions"
    )
    assert other == (2, "")


def test_another_number_of_processes_is_named():
    port = free_ports()
    (code, line), other = results(start(port, 0), start(port, 1, of=4))
    assert (code, other) == (2, (2, ""))
    assert "was started with --num-processes 4, and another with 2" in line


def test_two_processes_of_one_number_are_named():
    port = free_ports()
    (code, line), *others = results(start(port, 0, of=3), start(port, 1, of=3), start(port, 1, of=3))
    assert code == 2
    assert line.startswith("error: two processes are --process-id 1: ")
    assert others == [(2, "")] * 2


def test_a_process_that_does_not_come_is_named():
    port = free_ports()
    (code, line), other = results(start(port, 0, of=3, wait=1.5), start(port, 2, of=3, wait=1.5))
    assert (code, other) == (1, (1, ""))  # Not 2, on which Slurm and Kubernetes give up.
    assert line == "error: process 1 of 3 did not come within 1.5 s; start all, with the same --coordinator"


def test_a_coordinator_that_is_not_there_is_one_line():
    port = free_ports()
    [(code, line)] = results(start(port, 1, wait=1.0))
    assert code == 1
    assert line.startswith(
        f"error: process 1 did not reach process 0 at localhost:{port} within 1 s (connection refused)"
    )


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_one_line(offset):
    port = free_ports()
    with socket.create_server(("127.0.0.1", port + offset)):
        [(code, line)] = results(start(port, 0))
    assert code == 2
    assert line.startswith(f"error: cannot listen on port {port + offset} of this machine: address already in use; two")


def test_a_stranger_does_not_disturb_the_meeting():
    port = free_ports()
    first = start(port, 0)
    while True:
        try:
            stranger = socket.create_connection(("localhost", port))
            break
        except OSError:
            time.sleep(0.05)
    with stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert results(first, start(port, 1)) == [(0, "")] * 2


@pytest.mark.parametrize(
    ("lost", "number", "line"),
    [
        (1, signal.SIGKILL, "has died after step 7"),
        (1, signal.SIGSTOP, "has not answered for 2 s after step 7"),
        (0, signal.SIGKILL, "error: process 0 at localhost:{port} is gone; process 1 ends"),
        (0, signal.SIGSTOP, "error: process 0 at localhost:{port} has not answered for 2 s; the run ends"),
    ],
)
def test_a_lost_process_is_named_by_the_other(lost, number, line):
    port = free_ports()
    processes = [start(port, one, seconds=60, step=7) for one in range(2)]
    assert [process.stdout.readline() for process in processes] == ["met\n"] * 2
    time.sleep(1.5)  # For a beat with the step.
    processes[lost].send_signal(number)
    rest = processes[1 - lost]
    try:
        [(code, said)] = results(rest)
    finally:
        processes[lost].kill()
        processes[lost].communicate()
    assert code == 1
    assert line.format(port=port) in said


def test_what_fails_in_one_process_ends_all_and_is_said_once():
    port = free_ports()
    (code, line), other = results(start(port, 0, seconds=60), start(port, 1, fails="the disk is full"))
    assert (code, line) == (1, "error: process 1: the disk is full")
    assert other == (1, "")


def test_what_fails_everywhere_is_said_as_process_0_has_it():
    port = free_ports()
    processes = [start(port, number, fails=f"the loss is nan, {number}") for number in range(2)]
    assert results(*processes) == [(1, "error: the loss is nan, 0"), (1, "")]


def test_a_process_behind_the_others_is_named_with_where_it_is():
    port = free_ports()
    first, second = start(port, 0, seconds=4, step=8), start(port, 1, seconds=4, step=7)
    (code, line), other = results(first, second)
    assert (code, other) == (0, (0, ""))
    assert line.startswith("note: process 1 (")
    assert "is at step 7; the others have waited" in line


def test_a_servers_process_behind_the_others_ends_it():
    port = free_ports()
    first, second = start(port, 0, seconds=60, step=8, idle=False), start(port, 1, seconds=60, step=7)
    (code, line), other = results(first, second)
    assert (code, other) == (1, (1, ""))
    assert re.fullmatch(r"error: process 1 \(.*\) is at step 7; the others have waited 1 s for it", line)


@pytest.mark.parametrize(
    ("idle", "seconds", "code", "said"), [(True, 3, 0, ""), (False, 60, 1, "no step was taken for 1 s")]
)
def test_a_server_is_stuck_only_where_it_has_requests(idle, seconds, code, said):
    port = free_ports()
    with subprocess.Popen([sys.executable, "-c", HOST, str(port)], text=True, stdout=-1) as host:
        environment = dict(os.environ) | {HOSTED: "1"}
        processes = [start(port, number, environment, seconds=seconds, step=8, idle=idle) for number in range(2)]
        try:
            assert results(*processes) == [(code, "")] * 2
        finally:
            host.terminate()
        assert host.communicate()[0].partition(":")[0] == said


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("node7", "node7"), ("node001,host2", "node001"), ("node[001-015],host2", "node001"), ("n[3,7-9]-x", "n3")],
)
def test_slurm_says_who_auto_is(nodes, expected):
    environment = {
        "SLURM_JOB_ID": "6001",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
    }
    assert Processes("auto").found(environment) == Processes(f"{expected}:20002", 4, 3)
    assert Processes("auto").found({}) == Processes("auto")


def test_addresses():
    assert split_address("[::1]:1234") == ("::1", 1234)
    with pytest.raises(MeshwrightError, match="is not HOST:PORT"):
        split_address("host:65535")


def test_differences_are_by_path_and_short():
    facts = {0: flatten({"a": {"b": "x" * 100}}), 1: flatten({"a": {"b": "y"}})}
    assert find_difference(facts).startswith(f"process 1 has a.b y, and process 0 has {'x' * 57}...;")
    assert find_difference({0: {"a": 1}, 2: {"a": 1, "b": 2}}).startswith("process 2 has b 2, and process 0 has none;")
    assert find_difference({0: {"a": 1}, 1: {"a": 1}}) == ""


def test_a_relay_outlives_what_is_behind_it():
    with socket.create_server(("127.0.0.1", 0)) as service:
        relay = Relay("127.0.0.1", service.getsockname()[1], seconds=5, on_failure=pytest.fail)
        near = socket.create_connection(("127.0.0.1", relay.port), timeout=5)
        far, _ = service.accept()
        near.sendall(b"there")
        assert far.recv(10) == b"there"
        far.sendall(b"back")
        assert near.recv(10) == b"back"
        far.close()
    near.settimeout(0.3)
    with pytest.raises(TimeoutError):
        near.recv(10)
    near.close()


def test_a_relay_says_that_it_reaches_nobody():
    failures, failed = [], threading.Event()
    relay = Relay("127.0.0.1", free_ports(), seconds=0.2, on_failure=lambda why: (failures.append(why), failed.set()))
    with socket.create_connection(("127.0.0.1", relay.port)):
        assert failed.wait(5)
    assert failures == ["Connection refused"]
