"""Secrets of the environment and of the recipe are written nowhere."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp import redaction
from lit_fsdp.__main__ import main
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.logs import _StandardError

CANARY = "canary-4f1d9c"
SECOND = 'other"canary\\77'


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_remembered", set())
    monkeypatch.setenv("HF_TOKEN", CANARY)


def test_names_of_secrets(monkeypatch):
    secret = ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "db_password", "AWS_ACCESS_KEY_ID", "AZURE_STORAGE_KEY")
    secret += ("GITHUB_PAT", "MLFLOW_TRACKING_PASSWORD", "PGPASS_CREDENTIALS")
    public = ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PWD", "KEYBOARD", "HF_TOKEN_PATH", "COMPASS", "MONKEY")
    public += ("AWS_WEB_IDENTITY_TOKEN_FILE",)
    for name in secret + public:
        with monkeypatch.context() as patched:
            patched.setenv(name, "other-canary")
            assert redaction.redact("an other-canary") == ("an ***" if name in secret else "an other-canary"), name


def test_running_text():
    for text, shown in (
        (f"401 for token {CANARY}.", "401 for token ***."),
        ("git clone https://me:pa55@host/x", "git clone https://***@host/x"),
        ("s3://bucket/key@v1 and user@host:22", "s3://bucket/key@v1 and user@host:22"),
        ("GET /x?id=3&api_key=abc&n=1", "GET /x?id=3&api_key=***&n=1"),
        ("https://store/blob?sv=2&sig=a%2Fb", "https://store/blob?sv=2&sig=***"),
    ):
        assert redaction.redact(text) == shown


def test_a_secret_is_found_in_every_spelling(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", f" {SECOND}\n")
    for text in (SECOND, repr(SECOND), json.dumps(SECOND), "other%22canary%5C77"):
        assert redaction.redact(text).strip("'\"") == "***", text
    monkeypatch.setenv("TLS_PRIVATE_KEY", "-----BEGIN-----\nAAAABBBBCCCCDDDD\n-----END-----")
    assert redaction.redact("line: AAAABBBBCCCCDDDD") == "line: ***"
    monkeypatch.setenv("SHORT_TOKEN", "train")
    assert redaction.redact("data.train") == "data.train"
    monkeypatch.setenv("SHORT_TOKEN", "secret")
    assert redaction.redact("a secret of six") == "a *** of six"


def test_values_by_their_keys():
    arguments = {"api_key": "k", "password": 123456, "token": None, "offline": True, "tags": ("a",), "key": "x"}
    kept = {"eos_token": "</s>", "pad_token": "[PAD]", "num_token": 5, "loss_of_token": 0.5, "tokenizer": "x"}
    recipe = {
        "data": {"train": f"hub:{CANARY}/x", "max_seq_length": 8},
        "logger": [{"init_args": arguments}],
        "credentials": {"user": "me", "more": ["x", 7]},
        **kept,
    }
    before = json.dumps(recipe)
    assert redaction.redact_values(recipe) == {
        "data": {"train": "hub:***/x", "max_seq_length": 8},
        "logger": [{"init_args": arguments | {"api_key": "***", "password": "***"}}],
        "credentials": {"user": "***", "more": ["***", "***"]},
        **kept,
    }
    assert json.dumps(recipe) == before


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    logger = {"class_path": "lightning.pytorch.loggers.CometLogger", "init_args": {"api_key": "recipe-canary"}}
    values = {
        "trainer": {"max_steps": 1, "devices": 1, "default_root_dir": str(tmp_path / "run"), "logger": logger},
        "model": {"name": "nowhere/at-all"},
        "data": {"train": "https://me:url-canary@host/rows.jsonl"},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_saved_recipe_asks_for_its_secrets_again(recipe, tmp_path):
    shown = redaction.redact_values(yaml.safe_load(recipe.read_text()))
    saved, extra = tmp_path / "saved.yaml", tmp_path / "private.yaml"
    saved.write_text(yaml.safe_dump(shown))
    assert "canary" not in saved.read_text()
    words = ["--config", str(saved), "--data.train", "rows.jsonl"]
    key = "trainer.logger.init_args.api_key"
    with pytest.raises(ConfigError, match=f"(?s){key}: got .*pass it again: --{key} VALUE"):
        load_recipe(words, "fit")
    load_recipe([*words, f"--{key}", "new-canary"], "fit")
    assert redaction.redact("new-canary") == "***"
    extra.write_text(yaml.safe_dump({"trainer": {"logger": {"init_args": {"api_key": "mine"}}}}))
    found = load_recipe([*words, "--config", str(extra)], "fit").values
    assert found["trainer"]["logger"]["init_args"]["api_key"] == "mine"


def test_error_messages(recipe, tmp_path, capsys):
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: {}\nlogger:\n  api_key: [yaml-canary\n")  # the error quotes the line
    for words in (
        ["--trainer.max_stepz", CANARY],
        ["--model.optim.lr", CANARY],
        ["--model.password", "flag-canary"],
        ["--config", "https://me:flag-canary@host/x.yaml"],
        ["--config", str(broken)],
    ):
        assert main(["fit", "--config", str(recipe), *words]) == 2
        out, err = capsys.readouterr()
        assert "error: " in err
        assert "canary" not in out + err


def test_threads_that_die(capsys, monkeypatch):
    def fail() -> None:
        raise RuntimeError(CANARY)

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has one of its own
    with redaction.guarded_streams():
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    assert capsys.readouterr().err.endswith("RuntimeError: ***\n")


def test_whoever_replaces_write_gets_redacted_text(capsys, monkeypatch):
    """As W&B does to record the output."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    seen: list[str] = []
    with redaction.guarded_streams():
        before: Any = sys.stdout.write

        def recording(text: str) -> int:
            seen.append(text)
            return int(before(text))

        sys.stdout.write = recording  # type: ignore[method-assign]
        print(f"token {CANARY}")
        sys.stdout.write = before  # type: ignore[method-assign]
        print(CANARY)
    assert seen == ["token ***", "\n"]
    assert capsys.readouterr().out == "token ***\n***\n"


def test_log_lines_are_redacted_before_a_bar_wraps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow the present standard error, which a progress bar replaces."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz012345")
    handler, written = _StandardError(), io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    record = logging.makeLogRecord({"msg": "url https://user:hf_abcdefghijklmnopqrstuvwxyz012345@host", "levelno": 20})
    handler.emit(record)
    assert written.getvalue() == "url https://***@host\n"
