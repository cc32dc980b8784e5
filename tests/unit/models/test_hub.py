"""The hub without a network: a cache laid out as the hub's own, and failures of its own classes."""

from __future__ import annotations

import json
import threading
import time
import types

import pytest
from huggingface_hub import constants, errors

from lit_fsdp.commands import run
from lit_fsdp.errors import ConfigError
from lit_fsdp.models import hub
from lit_fsdp.models.tokenizers import miniature_tokenizer

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


def _http(kind, status):
    return kind(
        f"{status} for token {SECRET}", response=types.SimpleNamespace(headers={}, status_code=status, request=None)
    )


def _caused(error, cause):
    error.__cause__ = cause
    return error


FAILURES = {
    "gated": (lambda: _http(errors.GatedRepoError, 403), "which is gated", "accept the terms at https://"),
    "unknown": (lambda: _http(errors.RepositoryNotFoundError, 404), "does not know", "for a folder write ./some/model"),
    "401": (lambda: _http(errors.HfHubHTTPError, 401), "does not accept the token", "settings/tokens"),
    "403": (
        lambda: _caused(errors.LocalEntryNotFoundError("Got: 403"), _http(errors.HfHubHTTPError, 403)),
        "refuses to the account of the token",
        "fine-grained",
    ),
    "429": (
        lambda: _caused(errors.LocalEntryNotFoundError("Got: 429"), _http(errors.HfHubHTTPError, 429)),
        "too often",
        "lit-fsdp model prepare --name some/model",
    ),
    "offline": (lambda: errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE=1", "unset HF_HUB_OFFLINE"),
    "no network": (
        lambda: errors.LocalEntryNotFoundError("no connection"),
        "could not be fetched",
        "model prepare --name some/model where there is a network",
    ),
    "cut": (lambda: hub._NETWORK_ERROR("proxy"), "could not be fetched (proxy)", "HF_HUB_OFFLINE=1 here"),
    "full": (lambda: OSError(28, "No space left on device"), "could not be written", "set HF_HOME"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_say_what_to_do_and_no_token(monkeypatch, kind):
    error, given, fix = FAILURES[kind]

    def snapshot_download(*args, **kwargs):
        raise error()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", kind == "offline")
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: SECRET)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError) as raised:
        hub.fetch_model("some/model", trust_remote_code=False)
    assert raised.value.field == "model.name"
    assert given in raised.value.given
    assert fix in raised.value.fix
    assert SECRET not in str(raised.value)


def test_without_a_token_that_is_said(monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise _http(errors.GatedRepoError, 401)

    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"no token is set here(.|\n)*HF_TOKEN"):
        hub.fetch_model("some/model", trust_remote_code=False)


def test_of_many_that_ask_at_once_one_downloads(monkeypatch, tmp_path):
    calls, found = [], []
    (tmp_path / "model.safetensors").touch()

    def snapshot_download(*args, **kwargs):
        calls.append(args)
        time.sleep(0.3)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    threads = [threading.Thread(target=lambda: found.append(hub.fetch_model("a/b", False))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path] * 8
    assert len(calls) == 1
    monkeypatch.setattr(hub, "_STARTED", time.time() + 1)  # a later run asks again
    hub.fetch_model("a/b", False)
    assert len(calls) == 2
    monkeypatch.setattr(hub, "_STARTED", time.time() + 1)
    monkeypatch.setenv("LOCAL_RANK", "1")  # started by a first rank that has just asked
    assert hub.fetch_model("a/b", False) == tmp_path
    assert len(calls) == 2


def test_a_killed_note_is_no_answer(monkeypatch, tmp_path, cache):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    assert hub.fetch_model("a/b", False) == tmp_path
    for note in (cache / "hub").glob("*.json"):
        note.write_text('{"folder": "/no')
    assert hub.fetch_model("a/b", False) == tmp_path


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, saved):
    """A model in the layout of the hub's cache, as another process has left it there."""
    place = tmp_path / "hub" / "models--some--model"
    folder = place / "snapshots" / ("a" * 40)
    folder.parent.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    saved("llama", config={"vocab_size": 400}).rename(folder)
    miniature_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_prepare_names_what_is_in_the_cache(hub_cache, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: some/model, add_tokens: ['<|tool|>']}\n")
    assert run(["model", "prepare", "--config", str(recipe), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    size = sum(path.stat().st_size for path in [*hub_cache.glob("*.safetensors"), *hub_cache.glob("*.json")])
    assert record["hub_name"] == "some/model"
    assert (record["weights"]["folder"], record["weights"]["num_bytes"]) == (str(hub_cache), size)
    assert record["tokenizer"]["num_files"] >= 2
    assert run(["model", "prepare", "--name", "some/model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["weights", str(hub_cache)], ["tokenizer", str(hub_cache)]]


def test_a_cached_copy_without_its_weights(hub_cache):
    (hub_cache / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks its weights(.|\n)*lit-fsdp model prepare --name some/model"):
        run(["model", "prepare", "--name", "some/model"])
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (hub_cache / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub_cache / "model-1.safetensors").touch()
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        run(["model", "prepare", "--name", "some/model"])


def test_what_is_not_in_the_cache_offline(hub_cache):
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE=1 forbids to fetch it"):
        run(["model", "prepare", "--name", "some/other"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prepair"], "got prepair"),
        (["prepare"], "model.name: got null"),
        (["prepare", "--nam", "x"], "nam"),
        (["prepare", "--name"], "expected one argument"),
    ],
)
def test_bad_words(words, said):
    with pytest.raises(ConfigError, match=said):
        run(["model", *words])


def test_nothing_to_fetch(capsys, tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny("llama").to_dict()))
    words = ["--name", str(tmp_path / "config.json"), "--model.miniature", "true"]
    assert run(["model", "prepare", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "weights   random init, nothing to fetch",
        "tokenizer the generated one of the miniature",
    ]
