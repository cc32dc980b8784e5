"""Which tensor of a source is which parameter of the model: wrappers and prefixes go, everything else must agree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.checkpoint.importing.source import Source, SourceTensor
from lit_fsdp.errors import CheckpointError

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_forward_module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_dp_wrapped_module)\."
)
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(?:^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The transformers model that the source is matched against."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and persistent buffer by name, in the model's order; a tied one once."""
    parameters: frozenset[str]
    """Which of them an optimizer can train."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Every further name of a tied parameter, and the name it is stored under."""
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Config and tokenizer under ``hf/``, so that the result can be exported."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """What else the manifest says of the model."""


@dataclass(frozen=True)
class Matched:
    """A source held against a target."""

    weights: Mapping[str, SourceTensor]
    """By name in the target."""
    source_names: Mapping[str, str]
    """Name in the target by name in the source; tied names all lead to the one that is stored."""
    prefix: str
    """What stood before every name."""
    surplus: list[str]
    """Names in the source without a place in the target."""


def match(source: Source, target: Target, prefix: str | None, allow_surplus: bool, where: str) -> Matched:
    """Hold the names and shapes of ``source`` against ``target``.

    Args:
        source: Opened.
        target: The model.
        prefix: What stands before every name of the model in the source; None finds it.
        allow_surplus: Leave out what has no place in the model instead of refusing.
        where: The source in words, for errors.

    Raises:
        CheckpointError: Names are missing, surplus (all are listed) or ambiguous, shapes differ, or two tensors that
            the model ties have other values.
    """
    clean = {_WRAPPERS.sub("", name): name for name in source.weights}
    if len(clean) < len(source.weights):
        raise CheckpointError(f"{where}: names differ only in the wrappers they go through; import an unwrapped save")
    wanted = {*target.shapes, *target.ties}
    prefix = _find_prefix(clean, wanted, where) if prefix is None else prefix
    found = {name.removeprefix(prefix): name for name in clean if name.startswith(prefix)}
    source_names = {clean[name]: short for short, name in found.items() if short in wanted}
    weights: dict[str, SourceTensor] = {}
    for name in target.shapes:
        aliases = [name, *(alias for alias, first in target.ties.items() if first == name)]
        there = [source.weights[clean[found[alias]]] for alias in aliases if alias in found]
        if there:
            weights[name] = there[0]
            _check_tied(name, aliases, there, where)
    surplus = sorted(n for n in source.weights if n not in source_names and not _COMPUTED.search(n))
    _refuse(target, weights, [] if allow_surplus else surplus, prefix, where)
    to_target = {original: target.ties.get(name, name) for original, name in source_names.items()}
    return Matched(weights, to_target, prefix, surplus)


def cleaned(name: str, prefix: str) -> str:
    """A name without wrappers and ``prefix``."""
    return _WRAPPERS.sub("", name).removeprefix(prefix)


def _find_prefix(names: Iterable[str], wanted: set[str], where: str) -> str:
    """What stands before the names of the model, by most matches."""
    votes: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        votes.update(".".join([*parts[:cut], ""]) for cut in range(len(parts)) if ".".join(parts[cut:]) in wanted)
    ranked = votes.most_common()
    if not ranked:
        return ""
    best = [prefix for prefix, count in ranked if count == ranked[0][1]]
    if len(best) > 1:
        raise CheckpointError(
            f"{where}: holds the model {len(best)} times, under {', '.join(repr(p) for p in sorted(best))}; "
            f"say which one with --prefix {max(best, key=len)}"
        )
    return best[0]


def _check_tied(name: str, aliases: list[str], there: list[SourceTensor], where: str) -> None:
    """The model keeps one tensor, so the source's copies of it must be one."""
    first = there[0]
    for other in there[1:]:
        if other.spec != first.spec or not torch.equal(other.read(), first.read()):
            raise CheckpointError(
                f"{where}: {' and '.join(aliases)} differ, but this model ties them; is tie_word_embeddings wrong in "
                "the config given as --model?"
            )


def _refuse(target: Target, weights: Mapping[str, SourceTensor], surplus: list[str], prefix: str, where: str) -> None:
    lines = [f"missing in the source: {prefix}{name}" for name in target.shapes if name not in weights]
    lines += [f"no place in the model: {name}" for name in surplus]
    for name, tensor in weights.items():
        if tensor.spec.shape != tuple(target.shapes[name]):
            lines.append(f"{name}: {list(tensor.spec.shape)} in the source, {list(target.shapes[name])} in the model")
    if lines:
        advice = "; --allow-surplus leaves out what has no place" if surplus else ""
        raise CheckpointError(
            f"{where}: does not fit the model given as --model{advice}:\n" + "\n".join(f"  {line}" for line in lines)
        )
