"""The hub without a network: a cache laid out as the hub's own, and failures of its own classes."""

from __future__ import annotations

import json
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


TERMS, AHEAD = "accept the terms at https://", "lit-fsdp model prepare --name some/model"
FAILURES = {
    "gated": (lambda: _http(errors.GatedRepoError, 403), "403", TERMS),
    "unknown": (lambda: _http(errors.RepositoryNotFoundError, 404), "404", "for a folder write ./some/model"),
    "401": (lambda: _http(errors.HfHubHTTPError, 401), "401", "HF_TOKEN"),
    "403": (lambda: _caused(errors.LocalEntryNotFoundError("No"), _http(errors.HfHubHTTPError, 403)), "No", TERMS),
    "429": (lambda: _caused(errors.LocalEntryNotFoundError("No"), _http(errors.HfHubHTTPError, 429)), "No", AHEAD),
    "offline": (lambda: errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), "HF_HUB_OFFLINE", AHEAD),
    "no network": (lambda: errors.LocalEntryNotFoundError("no connection"), "no connection", AHEAD),
    "cut": (lambda: hub._NETWORK_ERROR("proxy"), "could not be fetched (proxy)", "HF_HUB_OFFLINE=1 here"),
    "full": (lambda: OSError(28, "No space left on device"), "No space left", "set HF_HOME"),
}


def test_failures_say_what_to_do_and_no_token(monkeypatch):
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: SECRET)
    for error, given, fix in FAILURES.values():

        def snapshot_download(*args, error=error, **kwargs):
            raise error()

        monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
        with pytest.raises(ConfigError) as raised:
            hub.fetch_model("some/model", trust_remote_code=False)
        assert raised.value.field == "model.name"
        assert given in raised.value.given
        assert fix in raised.value.fix
        assert SECRET not in str(raised.value)


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
