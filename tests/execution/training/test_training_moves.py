"""A run that goes from mesh to mesh and to several processes reads the same tokens in the same order."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.execution.processes.launch.supervisor import free_ports

sys.path.insert(0, str(Path(__file__).parent))
from data_files import write_lines, write_tokenizer

STEPS = 9
TEXT = "".join(f"{number} squared is {number**2}.\n" for number in range(2000))

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


def text(directory):
    (directory / "text.txt").write_text(TEXT)
    return ["tiny", "--num-layers", "2", "--data", str(directory / "text.txt")]


def chats(directory):
    """Two sources of packed records with weights: chats with loss on the assistant's turns, and text."""
    told = [
        {"messages": [{"role": "user", "content": f"{n} squared?"}, {"role": "assistant", "content": str(n * n)}]}
        for n in range(300)
    ]
    chats = write_lines(directory / "chats.jsonl", told)
    plain = write_lines(directory / "plain.jsonl", [{"text": f"{n} is a number."} for n in range(300)])
    model = write_tokenizer(directory / "model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    return [str(model), "--from-scratch", "--data", f"{chats}=0.7", f"{plain}=0.3"]


DATA = {"text": text, "chats": chats}
"""By its name, what makes data in a directory and has the model and the options that train on it."""


RECORDING = """
import pickle
import sys
import numpy as np
from meshwright.cli.main import main
from meshwright.execution.training.data.batches import Batches

read = Batches.__getitem__
file = open(sys.argv.pop(1), "wb")

def recorded(batches, step):
    batch = read(batches, step)
    for name, array in batch.items():
        shards = [([part.indices(n)[:2] for part, n in zip(shard.index, array.shape)], np.asarray(shard.data))
                  for shard in array.addressable_shards]
        pickle.dump((step, name, array.shape, shards), file)
    return batch

Batches.__getitem__ = recorded
code = main()
file.close()
raise SystemExit(code)
"""
"""Trains, and writes to a file what the devices of this process are given of each batch."""


def train(words, steps, processes=1):
    """Train to so many steps in some processes that share 8 devices; every array of every step's batch."""
    arguments = ["train", *words, "--on", "cpu:8", "--batch", "8", "--seq-len", "32", "--lr-schedule", "constant"]
    arguments += ["--steps", str(steps), "--resume"]
    run = Path(words[words.index("-o") + 1])
    records = [run.with_name(f"{run.name}-{steps}-{number}") for number in range(processes)]
    numbered = [[sys.executable, "-c", RECORDING, str(record), *arguments] for record in records]
    if processes > 1:
        meet = ["--coordinator", f"localhost:{free_ports()}", "--num-processes", str(processes)]
        numbered = [[*each, *meet, "--process-id", str(number)] for number, each in enumerate(numbered)]
    begun = [subprocess.Popen(each, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for each in numbered]
    try:
        said = [process.communicate(timeout=400) for process in begun]
    finally:
        for process in begun:
            process.kill()
    assert [process.returncode for process in begun] == [0] * processes, said
    return arrays_of(records)


def arrays_of(records):
    """By step and name, the whole arrays that several processes were given shards of."""
    found = {}
    for record in records:
        with record.open("rb") as file:
            while file.peek(1):
                step, name, shape, shards = pickle.load(file)
                whole = found.setdefault((step, name), np.full(shape, np.nan))
                for index, part in shards:
                    whole[tuple(slice(*ends) for ends in index)] = part
    return found


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", DATA)
def test_a_run_that_moves_reads_the_tokens_of_one_that_does_not(tmp_path, kind):
    data = DATA[kind](tmp_path)
    stays = train([*data, "-o", str(tmp_path / "stays"), "--mesh", "1,8,1,1"], STEPS)
    moves = [*data, "-o", str(tmp_path / "moves"), "--mesh"]
    read = train([*moves, "2,2,2,1"], 3) | train([*moves, "1,8,1,1"], 6)
    read |= train([*moves, "1,8,1,1"], STEPS, processes=4)
    assert {step for step, _ in stays} == set(range(STEPS))
    assert read.keys() == stays.keys()
    for place, array in stays.items():
        assert not np.isnan(array).any(), place
        assert np.array_equal(read[place], array), place
    assert len(losses(tmp_path / "moves")) == STEPS
    assert losses(tmp_path / "moves") == pytest.approx(losses(tmp_path / "stays"), abs=1e-4)
