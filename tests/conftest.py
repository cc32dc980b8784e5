"""What every test gets: no hub, no caches of the user, marks by folder."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before transformers or datasets are imported: both read these once. Child processes inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)

# A shell ignores Ctrl-C in what it starts in the background, and so would all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
_MARKS = {
    "gpu": pytest.mark.gpu,
    "dist": pytest.mark.dist,
    "faults": pytest.mark.dist,
    "golden": pytest.mark.dist,
    "slurm": pytest.mark.dist,
}

# Of tests with very many cases `make test` runs every n-th, `make test-long` (LIT_FSDP_LONG=1) all of them.
_EVERY = {
    "test_a_cell_trains_as_the_reference_does": 5,
    "test_another_topology": 8,
    "test_the_same_topology_is_bit_equal": 2,
    "test_the_next_twenty_losses_are_bit_equal": 2,
    "test_resumed_in_an_epoch_the_next_twenty_losses_are_bit_equal": 2,
    "test_compiled_blocks": 2,
    "test_units_do_not_change_the_losses": 2,
    "test_compiled_blocks_agree": 3,
    "test_peak_memory_is_far_below_the_models_size": 2,
    "test_the_example_runs": 2,
    "test_random_weights_equal_those_of_one_process": 5,
    "test_files_are_loaded_bit_for_bit": 3,
    "test_in_every_phase": 3,
    "test_saved_stopped_and_resumed": 3,
    "test_with_loaders_in_a_save": 2,
    "test_losses_and_parameters_are_bit_equal": 3,
    "test_a_bad_gradient_on_one_rank_skips_the_step_on_all": 5,
    "test_losses_equal_a_plain_loop": 3,
    "test_losses_are_those_of_plain_peft": 3,
    "test_losses_are_those_of_the_resized_model": 5,
    "test_adapters_with_new_tokens": 3,
    "test_it_says_what_a_run_does": 2,
    "test_a_checkpoint_of_lightning": 3,
    "test_the_same_bytes_as_a_save_that_training_waits_for": 3,
    "test_frozen_weights_as_units_of_their_own": 3,
    "test_experts_as_units": 3,
    "test_reductions_are_held_back_until_the_last_micro_batch": 3,
    "test_the_others_end_in_time": 3,
    "test_a_recipe_runs_in_miniature": 8,
    "test_as_a_job_it_passes_lint": 4,
    # tables of two by two: the first and the last, in which everything differs
    **dict.fromkeys(
        (
            "test_hybrid_on_four_ranks",
            "test_hybrid_with_one_copy_and_with_one_rank_per_copy",
            "test_clipping_equals_the_unsharded_result",
            "test_frozen_and_trainable_weights_share_units",
            "test_patterns_and_classes_change_no_losses",
            "test_averages_of_shards_are_refused",
            "test_both_ways_to_load_give_the_same_run",
            "test_logits_of_the_live_model",
            "test_a_checkpoint_of_accelerate",
        ),
        3,
    ),
    "test_two_ranks": 5,
    "test_no_canary_in_any_output": 3,
    "test_initial_values_never_touch_a_loaded_tensor": 2,
    "test_every_family_has_its_own_loss": 2,
}


# With `-n 2` two processes share the tests: whole folders that have one server or one cluster for all their tests, and
# of the others file after file. What takes longest is begun first.
_TOGETHER = ("tests/faults/", "tests/slurm/")
_ORDER = (*_TOGETHER, "tests/dist/")
_TABLES: list[str] = []  # of the processes that ran tests for this one


def _is_the_whole_suite(config: pytest.Config) -> bool:
    return not os.environ.get("LIT_FSDP_LONG") and not any("::" in argument for argument in config.args)


def _leave_some_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is only in the long version, and what is marked ``long``, unless asked for by its name."""
    if not _is_the_whole_suite(config):
        return
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        name = getattr(item, "originalname", item.name)
        is_long = item.get_closest_marker("long") or seen[name] % _EVERY.get(name, 1)
        (left_out if is_long else kept).append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; GPU tests say why they are skipped."""
    _leave_some_out(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next((n for n, folder in enumerate(_ORDER) if item.nodeid.startswith(folder)), 9))
    # Their processes share two cores with another test and whatever else runs: see the summary below.
    again = _is_the_whole_suite(config) and config.pluginmanager.hasplugin("rerunfailures")
    for item in items:
        relative = item.path.relative_to(ROOT / "tests") if item.path.is_relative_to(ROOT / "tests") else item.path
        mark = _MARKS.get(relative.parts[0])
        if mark is not None:
            item.add_marker(mark)
        if again and item.get_closest_marker("dist"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests one process runs one after the other, for ``-n``."""
    from xdist.scheduler import LoadFileScheduling

    class ByFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((f for f in _TOGETHER if nodeid.startswith(f)), None) or super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the order is that of the tests
    return ByFolder(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Keeps the table of injected faults of a process that ran them."""
    _TABLES.extend(getattr(node, "workeroutput", {}).get("injected faults", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """And prints it at the end, after what failed at the first attempt: to be looked into, whatever the second gave."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed at the first attempt: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    if _TABLES:
        terminalreporter.section("injected faults")
        for line in _TABLES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _caches_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of tokenized rows and converted models go to a folder of this test run, never to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_FSDP_CACHE", str(tmp_path_factory.getbasetemp() / "lit_fsdp_cache"))
        yield


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that a test runs in this process makes our log speak; the next test's log is silent again."""
    log = logging.getLogger("lit_fsdp")
    handlers, level = log.handlers[:], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout that is tested."""
    return ROOT
