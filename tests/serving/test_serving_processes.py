"""A server of two processes: the steps that process 0 sends to the other, the tokens, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.processes.launch.supervisor import free_ports
from meshwright.serving.engine.followers import decode_work, encode_work, follow
from meshwright.serving.engine.programs import Shape
from meshwright.serving.engine.runner import RowChange, Work
from meshwright.serving.engine.scheduler import PageCopy

LLAMA = Path(__file__).parents[1] / "references" / "llama"
SHAPE = Shape(rows=2, length=3, entries=(4, 2), num_chosen=3)
WORK = Work(
    kind="sampling",
    shape=SHAPE,
    packed=np.arange(2 * SHAPE.columns.width, dtype=np.int32).reshape(2, -1),
    mask=np.full((2, 3, 8), 0xFFFF0001, np.uint32),
    copies=(PageCopy(shard=0, window=1, source=5, target=-1),),
    changes=(RowChange(1, Sampling(temperature=0.7, top_p=0.1, seed=2**32 - 1), [1, 2], [3], [(7, -0.1)]),),
)


def test_a_step_goes_to_another_process_as_it_is():
    taken, frame = [], encode_work(WORK)
    near, far = socket.socketpair()
    with near, far:
        near.sendall(len(frame).to_bytes(8, "big") + frame + bytes(8))
        follow(far, taken.append)
    (found,) = taken
    assert (found.kind, found.shape, found.copies, found.targets) == (WORK.kind, WORK.shape, WORK.copies, None)
    np.testing.assert_array_equal(found.packed, WORK.packed)
    np.testing.assert_array_equal(found.mask, WORK.mask)
    assert (found.packed.dtype, found.mask.dtype) == (np.int32, np.uint32)
    (change,) = found.changes
    assert change._replace(bias=[tuple(pair) for pair in change.bias]) == WORK.changes[0]
    assert decode_work(encode_work(found)).copies == WORK.copies


def test_a_first_process_that_is_gone_ends_the_others():
    near, far = socket.socketpair()
    with near:
        near.sendall(bytes(5))
    with far, pytest.raises(MeshwrightError, match="process 0 is gone"):
        follow(far, lambda work: None)


WORDS = ["serve", str(LLAMA), "--on", "cpu:4", "--mesh", "fsdp=2,tp=2", "--batch", "4", "--context", "64"]
WORDS += ["--chunk", "16", "--port", "0"]
HANGING = """
import signal, sys, time
from meshwright.cli.main import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
sys.exit(main(sys.argv[1:]))
"""
"""meshwright in a process whose main thread hangs from SIGUSR1 on."""


class Started:
    """Two processes of one server on four devices, and what they wrote."""

    def __init__(self, directory):
        words = [*WORDS, "--coordinator", f"localhost:{free_ports()}", "--num-processes", "2"]
        self.errors = [directory / f"stderr{number}" for number in range(2)]
        self.processes = []
        for number in range(2):
            with self.errors[number].open("w") as stderr:
                command = [sys.executable, "-c", HANGING, *words, "--process-id", str(number)]
                self.processes.append(
                    subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=stderr, env=dict(os.environ))
                )

    def url(self):
        line = self.processes[0].stdout.readline()
        assert line.startswith("ready on http"), [path.read_text() for path in self.errors]
        return line.split()[-1]

    def said(self, number):
        """The lines of a process on stderr but those of a compiler that takes its time."""
        return [line for line in self.errors[number].read_text().splitlines() if "so far" not in line]


@pytest.fixture
def two(tmp_path):
    found = Started(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def body(prompt, count, **more):
    same = {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    return {"prompt": prompt, "max_tokens": count} | same | more


def tokens(url, prompt, count, **more):
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt, count, **more), timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.matrix
def test_two_processes_make_the_tokens_of_one_and_end_together(two):
    golden, url = np.load(LLAMA / "golden.npz"), two.url()
    prompts = [row[:length].tolist() for row, length in zip(golden["tokens"], golden["lengths"], strict=True)]
    wanted, found = golden["continuations"].tolist(), [None] * len(prompts)

    def ask(number):
        found[number] = tokens(url, prompts[number], len(wanted[number]))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == wanted
    sampled = {"temperature": 1.0, "seed": 5, "logprobs": 1}
    assert tokens(url, prompts[0], 8, **sampled) == tokens(url, prompts[0], 8, **sampled)
    # Whichever of them is asked to end, all drain and end well.
    two.processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in two.processes] == [0, 0]
    assert [line for number in range(2) for line in two.said(number) if line.startswith("error")] == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("killed", "how", "line"),
    [
        (0, signal.SIGKILL, "error: process 0 "),
        (1, signal.SIGKILL, "error: process 1 "),
        (1, signal.SIGSTOP, r"error: process 1 \(.*, pid \d+\) has not answered for 2\d s after step \d+$"),
        (
            1,
            signal.SIGUSR1,
            r"error: process 1 \(.*, pid \d+\) is at step \d+, in .*; the others have waited 2\d s for it$",
        ),
    ],
    ids=["kill the first", "kill", "stop", "hang"],
)
def test_a_process_that_is_lost_ends_the_other_in_one_line(two, killed, how, line):
    url, left = two.url(), two.processes[1 - killed]
    stopped = threading.Event()

    def ask():
        while not stopped.is_set():
            try:
                tokens(url, [1, 2, 3], 40)
            except (httpx.HTTPError, AssertionError):
                return

    tokens(url, [1, 2, 3], 2)  # So that both have taken steps.
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.0)
    before = two.said(1 - killed)
    two.processes[killed].send_signal(how)
    began = time.monotonic()
    assert left.wait(60) == 1
    assert time.monotonic() - began < 30
    stopped.set()
    asking.join()
    (said,) = two.said(1 - killed)[len(before) :]
    assert re.match(line, said)


class Launched:
    """Two processes of one server that `meshwright launch` started, and what it wrote."""

    def __init__(self):
        command = [sys.executable, "-m", "meshwright", "launch", "-n", "2", "--", *WORDS]
        self.process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.lines = []
        self._reading = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self._reading.start()

    def url(self):
        line = self.process.stdout.readline()
        assert line.startswith("ready on http"), self.lines
        return line.split()[-1]

    def child(self, number):
        """The id of a process of the server."""
        shown = subprocess.run(
            ["ps", "-ww", "--ppid", str(self.process.pid), "-o", "pid=,args="],
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        (pid,) = [line.split()[0] for line in shown.splitlines() if f"--process-id {number}" in line]
        return int(pid)

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self._reading.join()
            self.process.stdout.close()
            self.process.stderr.close()

    def __enter__(self):
        return self


@pytest.mark.matrix
def test_a_launched_server_answers_drains_and_starts_again():
    with Launched() as launched:
        url = launched.url()
        before = tokens(url, [1, 2, 3], 40)
        os.kill(launched.child(1), signal.SIGKILL)
        url = launched.url()
        with httpx.stream("POST", f"{url}/v1/completions", json=body([1, 2, 3], 40, stream=True)) as answer:
            lines = answer.iter_lines()
            pieces = [next(lines)]
            launched.process.terminate()
            pieces += lines
        assert launched.process.wait(60) == 0
    found = [json.loads(piece[6:])["choices"][0]["token_ids"] for piece in pieces if piece.startswith("data: {")]
    assert [token for each in found for token in each] == before
    lost, again = [line for line in launched.lines if line.startswith("launch: ")]
    assert re.fullmatch(r"launch: process 1 \(pid \d+\) was ended by SIGKILL after step \d+; all .* ended\n", lost)
    assert again == "launch: restart 1 of 3 in 1 s: 2 processes continue\n"
