"""Adapters over HTTP, on an engine: chosen by name, loaded from one folder alone, and unloaded."""

from dataclasses import replace

import httpx
import pytest
from serving_cases import alone, drawn_model, engine_of_few_programs
from started import serving
from test_engine_adapters import SETTINGS, TINY, save_adapter

import meshwright as mw
from meshwright.serving.engine.request import Request
from meshwright.serving.http.adapters import ServedAdapters
from meshwright.serving.http.service import ApiKey, Service

SMALL = replace(TINY, num_layers=1)
KEY = {"authorization": "Bearer secret"}
PROMPT = "The mesh has 2 axes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("http")
    drawn_model(config=SMALL).save(found / "base")
    for seed, name in enumerate(("first", "allowed/second", "allowed/third", "secret")):
        save_adapter(found / name, SMALL, seed, rank=2 if name != "allowed/third" else 7)
    (found / "allowed" / "link").symlink_to(found / "secret")
    return found


@pytest.fixture(scope="module")
def server(folder):
    model = mw.load(folder / "base", on="cpu:1")
    engine = engine_of_few_programs(model, replace(SETTINGS, adapter_slots=2))
    service = Service(
        engine=engine, model="base", context=engine.layout.context, tokenizer=model.tokenizer, stats=engine.stats,
        api_keys=(ApiKey("secret"),), adapters=ServedAdapters(engine, folder / "allowed"),
    )  # fmt: skip

    def start():
        engine.start()
        engine.load_adapter("first", engine.adapters.read("first", folder / "first"))

    with serving(service, start=start) as found:
        yield found
    engine.close()


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, headers=KEY, timeout=120) as made:
        yield made


def completion(client, model):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return client.post("/v1/completions", json=body)


def wanted(folder, adapter):
    merged = mw.load(folder / "base", on="cpu:1", adapter=folder / adapter if adapter else None)
    return list(alone(merged, Request(prompt=list(PROMPT.encode()), max_tokens=8)).tokens)


def tokens(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def said(response):
    return response.status_code, response.json()["error"]["message"]


def names(client):
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_requests_choose_adapters_that_are_loaded_and_unloaded_while_they_come(client, folder):
    assert tokens(completion(client, "base")) == wanted(folder, None)
    assert tokens(completion(client, "first")) == tokens(completion(client, "base:first")) == wanted(folder, "first")
    assert completion(client, "base:first").json()["model"] == "first"
    chat = client.post("/v1/chat/completions", json={"model": "nothing", "messages": []})
    assert chat.status_code in (400, 404)
    status, message = said(completion(client, "second"))
    assert (status, message) == (
        404, "there is no model 'second' on this server; its model is 'base' with the adapters 'first'"
    )  # fmt: skip
    made = client.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "second"})
    assert (made.status_code, made.json()) == (200, {"id": "second", "object": "model", "loaded": True})
    assert names(client) == ["base", "first", "second"]
    card = client.get("/v1/models/second").json()
    assert (card["id"], card["parent"], card["max_model_len"]) == ("second", "base", 64)
    assert tokens(completion(client, "second")) == wanted(folder, "allowed/second")
    embedded = [
        client.post("/v1/embeddings", json={"model": model, "input": PROMPT}).json()["data"][0]["embedding"]
        for model in ("base", "second")
    ]
    assert embedded[0] != embedded[1]
    again = client.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "second"})
    assert said(again) == (400, "there is an adapter 'second' already; unload it first, or use another name")
    full = client.post("/v1/load_lora_adapter", json={"lora_name": "more", "lora_path": str(folder / "allowed/second")})
    assert said(full)[0] == 400
    assert said(full)[1].startswith("all 2 adapter slots are in use, by first, second;")
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "second"})
    assert (gone.status_code, gone.json()) == (200, {"id": "second", "object": "model", "loaded": False})
    assert names(client) == ["base", "first"]
    assert completion(client, "second").status_code == 404


@pytest.mark.parametrize("path", ["../secret", "link", "/etc", "", "second/../../secret", "second\0"])
def test_requests_load_adapters_from_one_folder_alone(path, client):
    refused = client.post("/v1/load_lora_adapter", json={"lora_name": "more", "lora_path": path})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "path_not_allowed"
    assert names(client) == ["base", "first"]


def test_what_cannot_be_loaded_or_unloaded_says_why(client, server):
    def load(name, path):
        return said(client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}))

    assert load("third", "third")[0] == 400
    assert load("third", "third")[1].endswith("has rank 7; the slots of this server take 6 (--adapter-rank)")
    assert load("none", "none")[0] == 400
    assert load("base", "second") == (400, "lora_name is 'base', the name of the model; use another")
    assert said(client.post("/v1/unload_lora_adapter", json={"lora_name": "none"})) == (
        404, "there is no adapter 'none'; loaded are 'first'"
    )  # fmt: skip
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "first", "lora_path": "second"} if "unload" not in path else {"lora_name": "first"}
        assert httpx.post(server.url + path, json=body).status_code == 401
    assert names(client) == ["base", "first"]


def test_a_server_without_a_folder_changes_no_adapters(server, folder):
    fixed = replace(server.service, adapters=ServedAdapters(server.service.engine, None), api_keys=())
    with serving(fixed) as found:
        for path, body in (("load", {"lora_name": "x", "lora_path": "second"}), ("unload", {"lora_name": "first"})):
            refused = httpx.post(f"{found.url}/v1/{path}_lora_adapter", json=body)
            assert said(refused) == (
                403, "requests may not load or unload adapters of this server; start it with --adapter-folder"
            )  # fmt: skip
        assert [card["id"] for card in httpx.get(f"{found.url}/v1/models").json()["data"]] == ["base", "first"]
