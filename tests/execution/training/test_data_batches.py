"""Rows of documents, and the batch of any step: what is in them, and that seed and step alone decide it."""

import json
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from data_files import write_lines, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.data.document import Document
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import find_files
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.text.tokenizer import read_tokenizer
from meshwright.execution.training.data.batches import Batches
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.held_out import split
from meshwright.execution.training.data.mixture import Mixture
from meshwright.execution.training.data.packing import pack, pieces
from meshwright.execution.training.data.row_index import read_row_index, write_row_index
from meshwright.execution.training.data.rows import DocumentRows
from meshwright.execution.training.data.run_data import open_data
from meshwright.execution.training.data.stores import tokenize_sources
from meshwright.execution.training.data.text_files import TextBytes
from meshwright.mesh import MeshShape

SEQ_LEN, BATCH = 16, 8
MODEL = replace(PRESETS["tiny"], vocab=300)
WORKLOAD = Workload(model=MODEL, batch=BATCH, seq_len=SEQ_LEN)
SHAPE = (BATCH, SEQ_LEN)


class Documents:
    """Documents in memory, as a `Dataset`."""

    def __init__(self, documents):
        self.documents = documents
        self.offsets = np.cumsum([0, *(len(one.tokens) for one in documents)])
        masked = any(one.loss is not None for one in documents)
        self.loss_counts = np.array([one.loss_tokens for one in documents]) if masked else None

    def read(self, document, start=0, stop=None):
        found = self.documents[document]
        return Document(found.tokens[start:stop], None if found.loss is None else found.loss[start:stop])


def sharding(mesh="dp=8"):
    shape = MeshShape(**{name: int(size) for name, size in (part.split("=") for part in mesh.split(","))})
    return jax.sharding.NamedSharding(build_mesh(shape), jax.P(("dp", "fsdp") if "fsdp" in mesh else "dp"))


def make(config, *, tokenizer=None, seed=0, workload=WORKLOAD, order=None, draws=False, mesh="dp=8", notes=None):
    on_note = (lambda line: None) if notes is None else notes.append
    data = open_data(config, workload, tokenizer, seed=seed, on_note=on_note)
    shape = (workload.sequences, workload.seq_len)
    return Batches(data, sharding(mesh), shape, seed=seed, order=order, draws=draws)


def arrays(batch):
    return {name: np.asarray(array) for name, array in batch.items()}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """100 documents of 3 to 40 bytes, each of one letter that no other near it has."""
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    return str(write_lines(path, [{"text": chr(33 + n % 90) * (2 + n * 7 % 38)} for n in range(100)]))


def unpacked(batch):
    """The documents of a batch: each segment's tokens with its last target."""
    found = []
    for tokens, targets, segments in zip(batch["tokens"], batch["targets"], batch["segments"], strict=True):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            found.append(bytes([*tokens[here], targets[here][-1]]))
    return found


def test_windows_overlap_by_one_token_and_an_epoch_reads_each_once(tmp_path):
    texts = [bytes(np.random.default_rng(n).integers(33, 120, size=n * 100 + 57).astype(np.uint8)) for n in range(4)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    whole, found = b"\n".join(texts), make(DataConfig(sources=(str(tmp_path),)))
    count = (len(whole) - 1) // SEQ_LEN
    batches = [arrays(found[step]) for step in range(count)]
    rows = [bytes(row.astype(np.uint8)) for batch in batches for row in batch["tokens"]]
    assert sorted(rows[:count]) == sorted(whole[at * SEQ_LEN :][:SEQ_LEN] for at in range(count))
    for batch in batches:
        assert set(batch) == {"tokens", "targets"}
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_text_without_a_source_is_the_standard_library():
    [rows] = make(DataConfig())._data.training
    start = bytes(rows.read(0)["tokens"].astype(np.uint8))
    assert start == min(Path(json.__file__).parents[1].glob("*.py")).read_bytes()[:SEQ_LEN]
    assert rows.count > 100_000


def test_an_epoch_of_packed_rows_has_every_document_once_and_none_beside_another(lines):
    found = make(DataConfig(sources=(lines,)))
    rows = found._data.training[0]
    steps = -(-rows.count // BATCH)
    seen = []
    for step in range(steps):
        batch = arrays(found[step])
        assert batch["tokens"].dtype == batch["segments"].dtype == batch["positions"].dtype == np.int32
        np.testing.assert_allclose(batch["weights"].mean(), 1, rtol=1e-6)
        padding = batch["segments"] == 0
        assert not batch["weights"][padding].any()
        assert len(np.unique(batch["weights"][~padding])) == 1
        starts = np.diff(batch["segments"], axis=1, prepend=0) != 0
        assert not batch["positions"][starts].any()
        seen += unpacked(batch)
    pieces_of = [json.loads(line)["text"].encode() + b"\n" for line in Path(lines).read_text().splitlines()]
    wanted = [text[at : at + SEQ_LEN + 1] for text in pieces_of for at in range(0, len(text) - 1, SEQ_LEN)]
    counts = {text: seen.count(text) for text in set(seen)}
    assert set(wanted) == set(seen)
    extra = steps * BATCH - rows.count
    assert sum(counts.values()) - len(wanted) <= extra * SEQ_LEN
    assert rows.notes == {"documents_split": sum(len(text) - 1 > SEQ_LEN for text in pieces_of)}


def test_padded_rows_have_one_document_each(lines):
    batch = arrays(make(DataConfig(sources=(lines,), rows="padded"))[0])
    assert batch["segments"].max(axis=1).tolist() == [1] * BATCH


@given(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=60)
def test_rows_are_filled_in_order_while_documents_fit(slots, chunk):
    from meshwright.execution.training.data import packing

    slots, before = np.array(slots), packing.CHUNK
    packing.CHUNK = chunk
    try:
        starts = pack(slots, SEQ_LEN).tolist()
    finally:
        packing.CHUNK = before
    wanted, used = [0], 0
    for number, size in enumerate(slots):
        if number and (number % chunk == 0 or used + size > SEQ_LEN):
            wanted.append(number)
            used = 0
        used += size
    assert starts == [*wanted, len(slots)]


def index(directory, dataset, *, seed=None, block=10**6, is_packed=True):
    """The row index of all documents of a data set, given in blocks."""
    count = len(dataset.offsets) - 1
    blocks = [np.arange(at, min(at + block, count)) for at in range(0, count, block)]
    directory.mkdir()
    write_row_index(directory, dataset, blocks, SEQ_LEN, is_packed=is_packed, seed=seed)
    return read_row_index(directory)


def test_long_documents_are_split_where_all_has_loss_and_else_cut(tmp_path):
    long = np.arange(40, dtype=np.int32)
    found = pieces(Documents([Document(long), Document(long[:5])]), np.arange(2), SEQ_LEN)
    assert found.starts.tolist() == [0, 16, 32, 0]
    assert found.slots.tolist() == [16, 16, 7, 4]
    assert (found.long, found.lost) == (1, 0)
    masks = [np.arange(40) >= 10, np.arange(40) >= 30, np.arange(40) >= 0]
    masked = Documents([Document(long, mask) for mask in masks])
    found = pieces(masked, np.arange(3), SEQ_LEN)
    assert found.documents.tolist() == [0, 2]
    assert found.slots.tolist() == [16, 16]
    assert found.loss_counts.tolist() == [7, 16]
    assert (found.long, found.lost) == (3, 1)
    rows = DocumentRows("name", masked, SEQ_LEN, index(tmp_path / "masked", masked), is_packed=True)
    assert rows.notes == {"documents_cut": 3, "no_loss": 1}
    assert rows.read(0)["weights"].sum() == 7
    assert rows.sizes(np.arange(2)).loss_tokens == 23
    with pytest.raises(MeshwrightError, match="no document has loss in its first 16 tokens"):
        index(tmp_path / "lost", Documents([Document(long, masks[1])]))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_masks", [True, False])
def test_the_index_of_rows_is_the_same_in_blocks_of_any_size(tmp_path, monkeypatch, has_masks, is_packed):
    """It is made some documents at a time; the shuffle is NumPy's of all of them."""
    rng = np.random.default_rng(0)
    texts = [np.arange(size) for size in rng.integers(2, 40, size=500)]
    dataset = Documents([Document(text, rng.random(len(text)) < 0.2 if has_masks else None) for text in texts])
    monkeypatch.setattr("meshwright.execution.training.data.packing.CHUNK", 32)
    whole = index(tmp_path / "whole", dataset, seed=3, is_packed=is_packed)
    monkeypatch.setattr("meshwright.execution.training.data.row_index.BLOCK", 64)
    parts = index(tmp_path / "parts", dataset, seed=3, is_packed=is_packed, block=7)
    for name, array in whole._asdict().items():
        np.testing.assert_array_equal(array, getattr(parts, name), err_msg=name)
    found = pieces(dataset, np.arange(500), SEQ_LEN)
    order = np.random.default_rng(3).permutation(len(found.slots))
    np.testing.assert_array_equal(whole.documents, found.documents[order])
    assert whole.row_starts.tolist() == (
        pack(found.slots[order], SEQ_LEN).tolist() if is_packed else [*range(len(order) + 1)]
    )
    assert whole.tokens[-1] == found.slots.sum()
    assert whole.losses[-1] == (found.slots if found.loss_counts is None else found.loss_counts).sum()


class Repeated:
    """Documents of one text, so many that what is kept of each would be seen; their offsets are in a file."""

    loss_counts = None

    def __init__(self, path, count):
        np.save(path, np.arange(count + 1) * 9)
        self.offsets = np.load(path, mmap_mode="r")


def test_memory_does_not_grow_with_the_documents(tmp_path, monkeypatch):
    """Neither what is made once of all documents, nor what is open after: arrays of them are files."""
    monkeypatch.setattr("meshwright.execution.training.data.row_index.BLOCK", 4096)
    monkeypatch.setattr("meshwright.execution.training.data.held_out.BLOCK", 4096)
    peaks = []
    for count in (20_000, 200_000):
        dataset = Repeated(tmp_path / f"{count}.npy", count)
        (tmp_path / str(count)).mkdir()
        tracemalloc.start()
        training, held = split(count, 0.1, "name")
        write_row_index(tmp_path / str(count), dataset, training.blocks(), SEQ_LEN, is_packed=True, seed=0)
        found = read_row_index(tmp_path / str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found.documents) + sum(map(len, held.blocks())) == count
    # A byte a document would be 180,000.
    assert peaks[1] - peaks[0] < 20_000


def test_the_index_of_rows_is_made_once_and_a_damaged_one_is_one_line(lines, tmp_path, monkeypatch):
    config = DataConfig(sources=(lines,), held_out=0.2)
    first = arrays(make(config)[0])
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.execution.training.data.run_data.write_row_index", None)
        for name, array in arrays(make(config)[0]).items():
            np.testing.assert_array_equal(array, first[name])
        with pytest.raises(TypeError):
            make(replace(config, held_out=0.3))
    found = r"meshwright/tokens/\w+ is damaged: documents is not what was written; delete it, and the run makes it anew"
    for path in (tmp_path / "cache").glob("meshwright/tokens/*/documents"):
        data = bytearray(path.read_bytes())
        data[0] ^= 1  # Another document, which the run would read without a word.
        # Not in place: threads of the inputs above read batches ahead from the file, which is mapped.
        changed = path.with_name("changed")
        changed.write_bytes(data)
        changed.replace(path)
    with pytest.raises(MeshwrightError, match=found):
        make(config)


def test_weights_are_those_of_the_tokens_with_loss_over_the_whole_batch(tmp_path):
    records = [{"q": "x" * (n % 5 + 1), "a": "y" * (n % 3 + 1)} for n in range(60)]
    path = write_lines(tmp_path / "a.jsonl", records)
    batch = arrays(make(DataConfig(sources=(str(path),), fields=("[q],a",)))[0])
    has_loss = batch["weights"] > 0
    np.testing.assert_array_equal(has_loss, np.isin(batch["targets"], [ord("y"), ord("\n")]) & (batch["segments"] > 0))
    np.testing.assert_allclose(batch["weights"][has_loss], BATCH * SEQ_LEN / has_loss.sum(), rtol=1e-6)


@pytest.mark.parametrize("rows", ["windows", "packed", "padded"])
def test_a_batch_depends_on_seed_and_step_alone_on_any_mesh(lines, rows):
    config = DataConfig(sources=(lines,), rows=rows)
    one, other, split_more = make(config), make(config), make(config, mesh="dp=2,fsdp=4")
    for step in (3, 0, 7, 3):
        for name, array in arrays(one[step]).items():
            np.testing.assert_array_equal(array, other[step][name])
            np.testing.assert_array_equal(array, split_more[step][name])
    assert (np.asarray(one[0]["tokens"]) != np.asarray(make(config, seed=1)[0]["tokens"])).any()


def test_a_process_reads_the_rows_of_its_own_devices_alone(lines):
    found = make(DataConfig(sources=(lines,)))
    read, layout = [], found._layout
    rows = layout._rows[0]
    original = rows.read
    rows.read = lambda item: read.append(item) or original(item)
    whole, layout._here = layout._here, [2, 3]
    layout._place = lambda array: array
    part = found._make(5)
    assert len(read) == 2
    layout._here = whole
    for name, array in found._make(5).items():
        np.testing.assert_allclose(array[2:4], part[name])


def test_tokens_in_storage_order_keep_their_positions_and_weights(lines):
    order = np.random.default_rng(0).permutation(SEQ_LEN)
    config = DataConfig(sources=(lines,))
    plain, stored = arrays(make(config)[2]), arrays(make(config, order=order, draws=True)[2])
    assert stored.pop("draws").tolist() == [0, 2]
    for name, array in stored.items():
        np.testing.assert_array_equal(array, plain[name][:, order])
    windows = arrays(make(DataConfig(sources=(lines,), rows="windows"), order=order)[0])
    assert windows["positions"].tolist() == [order.tolist()] * BATCH


def test_a_mixture_has_the_shares_of_its_weights_at_any_step(lines, tmp_path):
    other = write_lines(tmp_path / "b.jsonl", [{"text": "~" * 16}] * 9)
    found = make(DataConfig(sources=(f"{lines}=0.75", f"{other}=0.25")))
    rows = np.concatenate([np.asarray(found[step]["tokens"]) for step in range(20)])
    assert (rows == ord("~")).all(axis=1).sum() == pytest.approx(0.25 * 160, abs=1)
    row = found.row(3)["sources"]
    # Of 32 rows 8 were of the other source, which has 9.
    assert row[str(other)] == {"tokens": 32, "documents": 2, "epoch": 0.888889}
    assert found.sizes(20)[str(other)] == {"rows": 9, "epochs": 4.444444}
    assert [*row] == [lines, str(other)]
    items = Mixture(found._data.training, (0.75, 0.25), 0)
    sources, numbers = items.at(np.arange(1200))
    for source, rows in enumerate(found._data.training):
        times = np.bincount(numbers[sources == source], minlength=rows.count)
        assert times.max() - times.min() <= 1
    far = items.at(np.arange(10**12, 10**12 + 4))
    assert far[0].tolist() == items.at(np.arange(4))[0].tolist()


def test_sources_without_weights_are_read_once_an_epoch_each(lines, tmp_path):
    other = write_lines(tmp_path / "b.jsonl", [{"text": "z" * 15}] * 9)
    data = make(DataConfig(sources=(lines, str(other))))._data
    total = sum(rows.count for rows in data.training)
    sources, items = Mixture(data.training, None, 0).at(np.arange(total))
    assert len({*zip(sources.tolist(), items.tolist(), strict=True)}) == total
    assert Mixture(data.training, None, 0).epochs(total // 2) == [total // 2 / total] * 2


def test_a_bar_is_shown_while_a_source_is_tokenised_and_never_again(lines, tmp_path):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text("To be, or not to be. " * 50)
    bars = []

    @contextmanager
    def bar(name, size):
        bars.append([name, size])
        yield bars[-1].append

    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "tokenizer"), vocab=300)
    workload = replace(WORKLOAD, model=replace(WORKLOAD.model, vocab=300))
    for config, reader in (
        (DataConfig(sources=(lines,), rows="packed"), None),
        (DataConfig(sources=tuple(map(str, texts))), tokenizer),  # Texts are one.
    ):
        bars.clear()
        tokenize_sources(config, workload, reader, bar)
        [(_, size, done, *rest)] = [[*each, 0] for each in bars]
        assert size == done + sum(rest)
        tokenize_sources(config, workload, reader, bar)
        open_data(config, workload, reader, seed=0)
        assert len(bars) == 1


@given(st.integers(2, 3000), st.floats(0.0001, 0.9), st.integers(0, 500))
def test_what_is_held_out_is_a_share_that_stays_when_documents_are_added(count, share, more):
    train, held = (np.concatenate([*part.blocks()]) for part in split(count, share, "name"))
    assert sorted([*train, *held]) == list(range(count))
    assert len(train)
    assert len(held)
    if count > 100 and share > 0.05:
        assert len(held) == pytest.approx(share * count, abs=5 * (share * count) ** 0.5)
        assert set(held) <= set(np.concatenate([*split(count + more, share, "name")[1].blocks()]))


@pytest.mark.parametrize("rows", ["windows", "packed"])
def test_held_out_rows_are_in_no_batch_of_training(tmp_path, rows):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"{n:03d} {n * 7:04d}"} for n in range(200)])
    found = make(DataConfig(sources=(str(path),), rows=rows, held_out=0.3))
    held, losses = [], 0
    for number in range(len(found.held_out)):
        batch = arrays(found.held_out[number])
        if rows == "packed":
            held += unpacked(batch)
            losses += (batch["weights"] > 0).sum()
            assert (batch["weights"] > 0).sum() == found.held_out.loss_tokens(number)
            np.testing.assert_allclose(batch["weights"].mean(), 1, rtol=1e-6)
        else:
            held += [bytes(row.astype(np.uint8)) for row in batch["tokens"]]
    trained = []
    for step in range(40):
        batch = arrays(found[step])
        trained += unpacked(batch) if rows == "packed" else [bytes(row.astype(np.uint8)) for row in batch["tokens"]]
    assert held
    assert not set(held) & set(trained)
    with pytest.raises(IndexError):
        found.held_out[len(found.held_out)]
    assert not len(make(DataConfig(sources=(str(path),))).held_out)


def test_bad_records_are_in_the_metrics_and_in_a_note(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [*[{"text": "words " * 5}] * 40, "broken", {"text": ""}])
    with pytest.raises(MeshwrightError, match="line 41: this is not JSON"):
        make(DataConfig(sources=(str(path),)))
    notes = []
    row = make(DataConfig(sources=(str(path),), bad_data="skip"), notes=notes).row(0)
    assert row["bad_data"] == {str(path): {"broken": 1, "empty": 1, "documents_split": 40}}
    assert any("left out 1 lines that are no JSON object, 1 empty documents" in note for note in notes)
    assert any("40 documents are longer than a row and are split" in note for note in notes)


def test_a_store_is_read_as_the_files_are_and_only_with_its_tokenizer(lines, tmp_path):
    source = find_files((lines,))
    tokenize(Tokenizing(source, find_encoder(source, None, None), "error", "bytes"), tmp_path / "store")
    files, store = make(DataConfig(sources=(lines,))), make(DataConfig(sources=(str(tmp_path / "store"),)))
    for name, array in arrays(files[1]).items():
        np.testing.assert_array_equal(array, store[1][name])
    assert files._data.fingerprint == store._data.fingerprint
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "tokenizer"), vocab=300)
    with pytest.raises(MeshwrightError, match="holds tokens of bytes, and this run has another tokenizer"):
        make(DataConfig(sources=(str(tmp_path / "store"),)), tokenizer=tokenizer)


def test_a_store_of_ids_beyond_the_models_vocabulary_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 299] * 20}] * 20)
    source = find_files((str(path),))
    tokenize(Tokenizing(source, find_encoder(source, None, None, vocab=300), "error", "bytes"), tmp_path / "store")
    make(DataConfig(sources=(str(tmp_path / "store"),)))
    small = Workload(model=PRESETS["tiny"], batch=BATCH, seq_len=SEQ_LEN)
    with pytest.raises(MeshwrightError, match="has token id 299, outside the vocabulary of 256"):
        make(DataConfig(sources=(str(tmp_path / "store"),)), workload=small)


def test_a_store_of_pairs_is_for_preference_tuning(tmp_path):
    records = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(20)]
    source = find_files((str(write_lines(tmp_path / "a.jsonl", records)),))
    tokenize(Tokenizing(source, find_encoder(source, None, None, pairs=True), "error", "bytes"), tmp_path / "store")
    with pytest.raises(MeshwrightError, match="holds pairs of answers, which --objective dpo learns from"):
        make(DataConfig(sources=(str(tmp_path / "store"),)))


def test_text_that_changes_while_a_run_reads_it_is_one_line(tmp_path):
    """A mapped file that is cut would end the process instead."""
    path = tmp_path / "a.txt"
    path.write_text("To be, or not to be. " * 100)
    text = TextBytes([path])
    assert bytes(text.read(0, 3, 5).tokens.tolist()) == b"be"
    path.write_text("To be")
    with pytest.raises(MeshwrightError, match=r"a\.txt was changed while the run reads it"):
        text.read(0, 100, 120)
    path.unlink()
    with pytest.raises(MeshwrightError, match=r"cannot read .*a\.txt: No such file"):
        text.read(0, 100, 120)


def test_too_little_data_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 128)
    with pytest.raises(MeshwrightError, match="the data has 128 bytes, 7 windows of 16; a batch has 8: give more data"):
        make(DataConfig(sources=(str(tmp_path / "a.txt"),)))
    (tmp_path / "a.txt").write_bytes(b"x" * 129)
    make(DataConfig(sources=(str(tmp_path / "a.txt"),)))


def test_an_error_while_reading_ahead_is_raised_where_the_batch_is_wanted(lines):
    found = make(DataConfig(sources=(lines,)))
    found[0]
    rows = found._layout._rows[0]

    def broken(item):
        raise MeshwrightError("the file is gone")

    found._ahead.clear()
    rows.read = broken
    with pytest.raises(MeshwrightError, match="the file is gone"):
        found[5]
    found.close()


@pytest.mark.parametrize(("name", "data", "message"), [
    ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
    ("a.txt", b"a\0b", "is binary"),
    ("a.csv", b"a,b", "is a table of text"),
])  # fmt: skip
def test_what_is_no_text_is_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MeshwrightError, match=message):
        make(DataConfig(sources=(str(tmp_path / name),)))
