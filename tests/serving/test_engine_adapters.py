"""Several adapters in one engine: each row's tokens are those of its adapter merged into the weights, alone."""

import shutil
import threading
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from serving_cases import alone, answers, drawn_model, engine_of_few_programs, greedy_requests, prompts_of, tokens_of

import meshwright as mw
from meshwright.description.families.adapters import with_adapters
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import is_adapter, leaves, parameters
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.peft import write_adapter
from meshwright.mesh import MeshShape
from meshwright.serving.engine.adapters import AdapterTable, SlotWeights
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.followers import decode_work, encode_work
from meshwright.serving.engine.request import Request, UnknownAdapterError
from meshwright.serving.engine.settings import EngineSettings
from meshwright.support.field_types import nested

TINY = replace(PRESETS["tiny"], num_layers=2, num_kv_heads=4)
SMALL, FEW_HEADS = replace(TINY, num_layers=1), replace(TINY, num_kv_heads=2)
SETTINGS = EngineSettings(
    rows=8, context=64, page_size=4, chunk_tokens=16, adapter_slots=3, adapter_rank=6,
    adapter_ends=("embedding", "unembedding"),
)  # fmt: skip
ADAPTERS = {
    "one": {"rank": 2, "targets": ("q_proj", "v_proj", "embed_tokens", "lm_head")},
    "all": {"rank": 6, "alpha": 3.0},
    "down": {"rank": 3, "targets": ("down", "output", "key"), "alpha": 30.0},
}


def save_adapter(directory, config, seed, *, rank, targets=("all-linear",), alpha=None, dora=False):
    """Write an adapter of drawn values, large enough that it changes tokens."""
    adapted = with_adapters(config, rank=rank, targets=targets, alpha=alpha, dora=dora)
    draw = np.random.default_rng(seed)
    own = {
        path: draw.normal(0, 0.2, parameter.shape)
        for path, parameter in leaves(parameters(adapted))
        if is_adapter(path)
    }
    directory.mkdir(parents=True)
    write_adapter(directory, adapted, nested(own), base="drawn")
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns a directory with a model of a config, and its adapters beside it."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def directory(config):
        found = root / f"{config.num_layers} layers, {config.num_kv_heads} heads"
        drawn_model(config=config).save(found / "base")
        for seed, (name, options) in enumerate(ADAPTERS.items()):
            save_adapter(found / name, config, seed, **options)
        return found

    return directory


def loaded(engine, directory, names=tuple(ADAPTERS)):
    for name in names:
        engine.load_adapter(name, engine.adapters.read(name, directory / name))


def of(engine, name, request):
    return replace(request, adapter=engine.adapters.by_name[name] if name else None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mesh .* takes the first")
@pytest.mark.parametrize(
    ("on", "mesh", "options"),
    [
        ("cpu:8", "dp=2,fsdp=2,tp=2", {"cache_split": "batch", "config": SMALL}),
        pytest.param("cpu:1", "dp=1", {}, marks=pytest.mark.exhaustive),
        pytest.param("cpu:2", "tp=2", {"num_drafts": 2}, marks=pytest.mark.matrix),
        pytest.param("cpu:4", "fsdp=4", {"cache_split": "sequence"}, marks=pytest.mark.exhaustive),
        pytest.param("cpu:8", "fsdp=2,tp=2,sp=2", {}, marks=pytest.mark.matrix),
        pytest.param("cpu:4", "tp=4", {"config": FEW_HEADS}, marks=pytest.mark.matrix),
        pytest.param("cpu:4", "fsdp=2,tp=2", {"config": PRESETS["tiny-gemma3n"]}, marks=pytest.mark.matrix),
    ],
)
def test_a_batch_of_several_adapters_has_the_tokens_of_each_merged_alone(on, mesh, options, saved):
    config = options.get("config", TINY)
    directory = saved(config)
    engine = engine_of_few_programs(
        mw.load(directory / "base", on=on, mesh=mesh),
        replace(SETTINGS, **{name: value for name, value in options.items() if name != "config"}),
    )
    engine.start()
    try:
        loaded(engine, directory)
        plain = greedy_requests(prompts_of(16, vocab=256, longest=30), most_tokens=16)
        names = ["", *ADAPTERS] * 4
        got = answers(engine, [of(engine, name, request) for name, request in zip(names, plain, strict=True)])
    finally:
        engine.close()
    for name in ("", *ADAPTERS):
        merged = mw.load(directory / "base", on="cpu:1", adapter=directory / name if name else None)
        for own, request, outputs in zip(names, plain, got, strict=True):
            if own == name:
                assert tokens_of(outputs) == alone(merged, request).tokens, name
    unlike = [tokens_of(outputs) == alone(merged, request).tokens for request, outputs in zip(plain, got, strict=True)]
    assert not all(unlike)


@pytest.fixture(scope="module")
def engine(saved):
    found = engine_of_few_programs(mw.load(saved(TINY) / "base", on="cpu:1"), SETTINGS)
    found.start()
    yield found
    found.close()


@pytest.fixture
def directory(saved, engine):
    """The saved adapters of an engine without any that is loaded."""
    for name in list(engine.adapters.by_name):
        engine.adapters.drop(name)
    return saved(TINY)


def test_adapters_share_no_prefix_with_each_other_or_with_their_successor(engine, directory, tmp_path):
    request = Request(prompt=list(range(40)), max_tokens=6)
    loaded(engine, directory)

    def answer(name):
        ((first, *rest),) = answers(engine, [of(engine, name, request)])
        return tokens_of([first, *rest]), first.cached_tokens

    first = {name: answer(name) for name in ("", "one", "all")}
    again = {name: answer(name) for name in first}
    assert all(cached == 0 for _, cached in first.values())
    assert all(cached > 0 for _, cached in again.values())
    assert {name: tokens for name, (tokens, _) in again.items()} == {
        name: tokens for name, (tokens, _) in first.items()
    }
    assert len({tokens for tokens, _ in first.values()}) == 3
    engine.adapters.drop("one")
    engine.load_adapter("one", engine.adapters.read("one", save_adapter(tmp_path / "new", TINY, 9, rank=6)))
    tokens, cached = answer("one")
    assert cached == 0
    assert tokens != first["one"][0]


def test_requests_of_a_dropped_adapter_are_answered_to_their_end(engine, directory):
    loaded(engine, directory)
    wanted = alone(
        mw.load(directory / "base", on="cpu:1", adapter=directory / "all"), Request(prompt=[1, 2], max_tokens=40)
    )
    adapter, tokens, done, begun = engine.adapters.by_name["all"], [], threading.Event(), threading.Event()

    def deliver(outputs):
        tokens.extend(token for output in outputs for token in output.tokens)
        begun.set()
        if outputs[-1].done:
            done.set()

    hold = threading.Event()
    engine.submit(
        Request(prompt=[1, 2], max_tokens=40, adapter=adapter), lambda outputs: (deliver(outputs), hold.wait(20))
    )
    assert begun.wait(60)
    engine.adapters.drop("all")
    with pytest.raises(UnknownAdapterError, match="'all' was unloaded"):
        engine.submit(Request(prompt=[1, 2], max_tokens=1, adapter=adapter), lambda outputs: None)
    failed = []

    def load_other():
        try:
            engine.load_adapter("other", engine.adapters.read("other", directory / "all"))
        except MeshwrightError as error:
            failed.append(str(error))

    other = threading.Thread(target=load_other)
    other.start()
    # The engine's thread is still in the first delivery, so that the request runs when the adapter is to be loaded.
    hold.set()
    other.join(60)
    assert failed == ["all 3 adapter slots are in use, by all, down, one; unload one, and wait for its requests"]
    assert done.wait(60)
    assert tuple(tokens) == wanted.tokens
    answers(engine, [Request(prompt=[3], max_tokens=1)])
    engine.load_adapter("other", engine.adapters.read("other", directory / "one"))
    assert engine.adapters.by_name["other"].slot == adapter.slot


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("wide", {"rank": 8}, r"wide has rank 8; the slots of this server take 6 \(--adapter-rank\)"),
        (
            "other",
            {"rank": 2, "config": replace(TINY, embed=32)},
            r"is for \[32, 128\]; the model has \[128, 128\] there",
        ),
        ("deep", {"rank": 2, "config": replace(TINY, num_layers=3)}, "holds .*layers.2.*, which no target of"),
        ("a:b", {"rank": 2}, r"the adapter's name is 'a:b'; a name has at most 64 of"),
        ("one", {"rank": 2}, "there is an adapter 'one' already; unload it first"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_a_line_and_changes_nothing(
    name, options, said, engine, directory, tmp_path
):
    loaded(engine, directory, ["one"])
    before = {path: np.asarray(array) for path, array in leaves(engine.runner._params) if is_adapter(path)}
    config = options.pop("config", TINY)
    save_adapter(tmp_path / name, config, 0, **options)
    with pytest.raises(MeshwrightError, match=said) as error:
        engine.load_adapter(name, engine.adapters.read(name, tmp_path / name))
    assert "\n" not in str(error.value)
    assert list(engine.adapters.by_name) == ["one"]
    after = dict(leaves(engine.runner._params))
    assert all(np.array_equal(array, after[path]) for path, array in before.items())


def test_an_adapter_with_whole_modules_or_without_files_is_refused(engine, directory, tmp_path):
    shutil.copytree(directory / "one", tmp_path / "saved")
    config = tmp_path / "saved" / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias": "none"', '"bias": "none", "modules_to_save": ["lm_head"]'))
    with pytest.raises(MeshwrightError, match=r"has modules_to_save=\['lm_head'\], which is not read here"):
        engine.adapters.read("saved", tmp_path / "saved")
    with pytest.raises(MeshwrightError, match="there is no directory"):
        engine.adapters.read("none", tmp_path / "none")


def test_what_slots_have_no_room_for_is_refused_in_a_line(saved, tmp_path):
    table = AdapterTable(replace(SETTINGS, adapter_ends=("unembedding",)).with_slots(TINY), MeshShape())
    with pytest.raises(
        MeshwrightError, match="one has an adapter of the embedding, for which this server's slots have no space"
    ):
        table.read("one", saved(TINY) / "one")
    save_adapter(tmp_path / "dora", TINY, 0, rank=2, dora=True)
    with pytest.raises(
        MeshwrightError, match="dora has use_dora=True, which is not served by name; add it to the weights"
    ):
        table.read("dora", tmp_path / "dora")


def test_an_adapter_goes_to_another_process_as_it_is(engine, directory):
    weights = SlotWeights(2, engine.adapters.read("down", directory / "down"))
    found = decode_work(encode_work(weights))
    assert isinstance(found, SlotWeights)
    assert found.slot == 2
    assert jax.tree.all(jax.tree.map(np.array_equal, dict(found.factors), dict(weights.factors)))


def test_an_engine_without_slots_says_how_it_gets_them(saved):
    engine = Engine(mw.load(saved(TINY) / "base", on="cpu:1"), replace(SETTINGS, adapter_slots=0))
    with pytest.raises(MeshwrightError, match="has no adapter slots; start the server with --adapter-slots"):
        engine.adapters.read("one", saved(TINY) / "one")
    engine.close()
