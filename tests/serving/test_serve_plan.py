"""`meshwright serve --plan`: what a server takes from a plan's file, what goes over it, and what it refuses."""

from dataclasses import replace

import pytest
from serving_cases import drawn_model

from meshwright.cli.main import main
from meshwright.description.families.registry import PRESETS
from meshwright.planning.serving.plan import write_serving_plan
from meshwright.planning.serving.search import best_serving_plan
from meshwright.serving.engine.settings import EngineSettings

MODEL = replace(PRESETS["tiny"], num_layers=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    drawn_model(config=MODEL).save(path)
    return path


@pytest.fixture
def served(directory, tmp_path, monkeypatch):
    """What `serve` would load and start, of a plan with some options and of other words."""

    def serve(*words, phase="decode", model=MODEL, mesh="fsdp=4,tp=2", cache="sequence", **options):
        plan = {"on": "cpu:8", "batch": 8, "prompt_len": 48, **options}
        path = tmp_path / "serve.yaml"
        write_serving_plan(best_serving_plan(model, phase, plan, mesh=mesh, cache=cache), path)
        reached = []
        monkeypatch.setattr("meshwright.cli.serve.command.read_with_bar", lambda found, on_note: found)
        monkeypatch.setattr("meshwright.serving.server.Engine", lambda found, settings, draft: (found, settings))
        monkeypatch.setattr("meshwright.serving.server._serve", lambda engine, *rest: reached.append(engine))
        code = main(["serve", str(directory), "--plan", str(path), *words])
        return (code, *reached[0]) if reached else (code, None, None)

    return serve


def test_a_server_is_laid_out_as_its_plan_says(served):
    code, found, settings = served(output_len=16)
    assert code == 0
    assert (str(found.system), str(found.mesh), found.dtype) == ("cpu:8", "fsdp=4,tp=2", "f32")
    # Of a page, 16 tokens are on each of the 4 devices that share it.
    assert settings == EngineSettings(rows=8, context=64, page_size=64, cache_split="sequence")


def test_int8_of_a_plan_is_that_of_the_server(served):
    _, _, settings = served(output_len=16, cache="batch", weight_dtype="int8", kv_dtype="int8")
    assert settings == EngineSettings(rows=8, context=64, cache_split="batch", weight_dtype="int8", kv_dtype="int8")


def test_options_go_over_a_plan(served):
    words = ["--mesh", "dp=4,tp=2", "--batch", "4", "--page-size", "8", "--dtype", "bf16"]
    _, found, settings = served(*words, output_len=16)
    assert (str(found.mesh), found.dtype) == ("dp=4,tp=2", "bf16")
    assert settings == EngineSettings(rows=4, context=64, page_size=8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "tiny"}, "is a plan of tiny, with num_layers 2; "),
        ({"phase": "prefill", "cache": None}, "plans prefill, and a server decodes too"),
        ({"weight_dtype": "bf16"}, "plans weights in bf16; a server stores them in the compute dtype, f32, or"),
        ({"kv_dtype": "int4"}, "int4; a server stores them in the compute dtype, f32, or in int8 or fp8"),
    ],
)  # fmt: skip
def test_a_plan_that_is_not_of_this_server_is_refused(served, capfd, options, said):
    code, _, _ = served(**options)
    assert code == 2
    assert said in " ".join(capfd.readouterr().err.split())
