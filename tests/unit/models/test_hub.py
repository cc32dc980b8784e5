"""The hub without a network: a cache laid out as the hub's own, and failures of its own classes."""

from __future__ import annotations

import json
import types
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from lit_fsdp.commands import run
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.models import hub
from lit_fsdp.models.tokenizers import miniature_tokenizer


def test_failures_say_what_to_do(monkeypatch):
    gated = errors.GatedRepoError("403", response=types.SimpleNamespace(headers={}, status_code=403, request=None))
    for error, given in (
        (gated, "403"),
        (errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), "HF_HUB_OFFLINE"),
        (hub._NETWORK_ERROR("proxy"), "could not be fetched (proxy)"),
        (OSError(28, "No space left on device"), "No space left"),
    ):
        monkeypatch.setattr(hub, "snapshot_download", mock.Mock(side_effect=error))
        with pytest.raises(ConfigError) as raised:
            hub.fetch("some/model", "model", trust_remote_code=False)
        assert raised.value.field == "model.name"
        assert given in raised.value.given
        assert "lit-fsdp model prepare --name some/model" in raised.value.fix
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"got runs/data/model.gguf, which does not exist\n.*\n.*relative to /"):
        hub.fetch("runs/data/model.gguf", "config", trust_remote_code=False)
    with pytest.raises(ConfigError, match=r"which is neither a GGUF file nor a config(.|\n)*name its folder"):
        hub.fetch(__file__, "config", trust_remote_code=False)


def test_a_missing_package_is_named():
    for error, fix in (
        (ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece"), "pip install sentencepiece"),
        (ImportError("Please install gguf>=0.10.0 to load a GGUF file"), "pip install 'lit-fsdp[gguf]'"),
        (ImportError("it requires the protobuf library"), "install the package named in the error"),
        (OSError("no such file"), "check that the files are complete"),
    ):
        with pytest.raises(ConfigError) as raised, hub.reading("some.gguf"):
            raise error
        assert raised.value.fix == fix


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
    for words in (["--config", str(recipe)], ["--name", "some/model"]):
        assert run(["model", "prepare", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split() for line in lines] == [["weights", str(hub_cache)], ["tokenizer", str(hub_cache)]]


def test_a_cached_copy_without_its_weights(hub_cache):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (hub_cache / "model.safetensors").rename(hub_cache / "model-1.safetensors")
    (hub_cache / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        run(["model", "prepare", "--name", "some/model"])
    (hub_cache / "model-1.safetensors").unlink()
    (hub_cache / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"without weights(.|\n)*lit-fsdp model prepare --name"):
        run(["model", "prepare", "--name", "some/model"])


def test_push_to_the_hub(monkeypatch, tmp_path):
    api = mock.Mock()
    monkeypatch.setattr(hub, "HfApi", lambda: api)
    api.create_repo.return_value = huggingface_hub.RepoUrl("https://huggingface.co/me/model")
    (tmp_path / "config.json").write_text("{}")
    api.list_repo_files.return_value = [".gitattributes", "README.md", "config.json", "img/a.json", "LICENSE"]
    assert hub.push(tmp_path, "model", True) == "https://huggingface.co/me/model"
    assert api.create_repo.call_args.kwargs["private"] is True
    uploaded = api.upload_folder.call_args.kwargs
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("me/model", tmp_path)
    api.repo_info.return_value.private = False
    with pytest.raises(ConfigError, match="model with --private, but it is public"):
        hub.push(tmp_path, "model", True)
    assert api.upload_folder.call_count == 1

    for stale in ("chat_template.jinja", "tokenizer.model", "model-00001-of-00002.safetensors", "adapter_config.json",
                  "additional_chat_templates/tool_use.jinja", "model.safetensors.index.json"):  # fmt: skip
        api.list_repo_files.return_value = ["README.md", "config.json", stale]
        with pytest.raises(
            ConfigError, match=f"model with {stale}, which.*\n.*\n.*hf repos delete-files me/model {stale}"
        ):
            hub.push(tmp_path, "model", False)
    assert api.upload_folder.call_count == 1

    for error in (hub._NETWORK_ERROR("proxy"), errors.HFValidationError("a/b/c")):
        api.create_repo.side_effect = error
        with pytest.raises(ConfigError) as raised:
            hub.push(tmp_path, "me/model", False)
        assert f"run hf upload me/model {tmp_path}" in raised.value.fix
    with pytest.raises(ConfigError, match="--private: got no --push-to-hub"):
        run(["export", "--ckpt", "none", "--out", str(tmp_path / "out"), "--private"])
