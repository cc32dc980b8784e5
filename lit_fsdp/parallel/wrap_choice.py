"""Units as the recipe names them: by class, by path, by size, and the experts of a mixture-of-experts model.

Every function gives modules of the model in its own order and changes nothing; a choice that matches nothing is an
error that lists what there is instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from lit_fsdp.errors import ConfigError

# Their forward reads the weights of modules inside them without calling these, so that no hook would gather them.
_READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def can_be_unit(module: nn.Module) -> bool:
    """Whether the module holds parameters and is called: hooks on a list's ``forward`` would never run."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


def class_list(model: nn.Module) -> str:
    """The classes in a model that can be named as units, sorted."""
    return ", ".join(sorted({type(m).__name__ for m in model.modules() if m is not model and can_be_unit(m)}))


def transformers_models(model: nn.Module) -> list[nn.Module]:
    """The transformers models at or inside ``model``, outer ones first."""
    return [m for m in model.modules() if hasattr(m, "_no_split_modules") and hasattr(m, "get_input_embeddings")]


def modules_of_classes(model: nn.Module, classes: Iterable[str], path: str) -> list[nn.Module]:
    """Every module whose class has one of these names.

    Raises:
        ConfigError: A name that matches no module; the classes that do exist are listed.
    """
    found: list[nn.Module] = []
    for name in classes:
        matches = [m for m in model.modules() if type(m).__name__ == name]
        if not matches:
            raise ConfigError(
                path,
                f"{name!r}, which matches no module",
                f"classes in this model: {class_list(model)}",
                "name one of these, or set wrap: auto",
            )
        found += _usable(matches, name, path, f"classes in this model: {class_list(model)}")
    return found


def modules_of_patterns(model: nn.Module, patterns: Iterable[str], path: str) -> list[nn.Module]:
    """Every module at one of these paths, in which ``*`` stands for one part.

    A path starts at ``model`` (the LightningModule) or, where nothing is found from there, at a transformers model
    inside it: ``model.layers.*.mlp`` finds the LightningModule's ``model.model.layers.0.mlp``. Where a last ``*`` finds
    no parameters because the module above packs them into weights of its own, as transformers packs experts, that
    module is meant.

    Raises:
        ConfigError: A pattern that matches nothing; the part of it that does match is named, with what is below it.
    """
    starts = [model, *(m for m in transformers_models(model) if m is not model)]
    found: list[nn.Module] = []
    for pattern in patterns:
        reached = [_follow(start, pattern.split(".")) for start in starts]
        complete = next((levels[-1] for levels in reached if len(levels) == len(pattern.split(".")) + 1), None)
        if complete is None:
            raise _no_match(model, pattern, reached, path)
        packed = _packed(reached, pattern, complete)
        found += packed or _usable(complete, pattern, path, "paths of modules that hold parameters and have a forward")
    return found


def modules_of_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Modules grouped bottom-up: one becomes a unit as soon as its not yet grouped parameters reach the size."""
    grouped: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        if isinstance(module, _READS_ITS_CHILDREN):
            free = sum(p.numel() for p in module.parameters())
        else:
            free = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
        if free >= min_num_params and module is not model and can_be_unit(module):
            grouped.append(module)
            return 0
        return free

    visit(model)
    return grouped


def expert_modules(model: nn.Module, path: str) -> list[nn.Module]:
    """The experts of a mixture-of-experts model: each module called ``experts``, or the members of such a list.

    Packed experts (3-D weights, one forward for all) are one unit per block. Of a plain list each member is a unit of
    its own; every rank must then call every expert in every step, with no rows if need be, as it takes part in the
    expert's gathers and reductions.

    Raises:
        ConfigError: The model has none.
    """
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            found += [m for m in ([module] if can_be_unit(module) else module.children()) if can_be_unit(m)]
    if not found:
        raise ConfigError(
            path,
            "true, but the model has no module called experts that holds parameters",
            f"a mixture-of-experts model; classes in this model: {class_list(model)}",
            "drop experts, or name the class or the path of its experts",
        )
    return found


def _usable(matches: list[nn.Module], name: str, path: str, allowed: str) -> list[nn.Module]:
    """Those with parameters; a list among them is refused, as is a match without any parameter."""
    holding = [m for m in matches if any(True for _ in m.parameters())]
    never_called = [m for m in holding if not can_be_unit(m)]
    if holding and not never_called:
        return holding
    why = f"only a {type(never_called[0]).__name__}, never called itself" if never_called else "no parameters"
    fix = f"name what is in it ({name}.*)" if never_called and "." in name else "name the modules that hold them"
    raise ConfigError(path, f"{name!r}, which matches {why}", allowed, fix)


def _packed(reached: list[list[list[nn.Module]]], pattern: str, matches: list[nn.Module]) -> list[nn.Module]:
    """The modules above a last ``*`` that matches no parameters, if these hold parameters themselves."""
    if not pattern.endswith(".*") or any(True for m in matches for _ in m.parameters()):
        return []
    above = next(levels[-2] for levels in reached if levels[-1] is matches)
    return [m for m in above if m._parameters and can_be_unit(m)]


def _follow(start: nn.Module, parts: list[str]) -> list[list[nn.Module]]:
    """Modules reached after 0, 1, 2, … parts of a path, as far as it matches."""
    levels = [[start]]
    for part in parts:
        below = {
            child: None
            for module in levels[-1]
            for name, child in module._modules.items()
            if child is not None and fnmatchcase(name, part)
        }
        if not below:
            break
        levels.append(list(below))
    return levels


def _no_match(model: nn.Module, pattern: str, reached: list[list[list[nn.Module]]], path: str) -> ConfigError:
    parts, names = pattern.split("."), {module: name for name, module in model.named_modules()}

    def what_is_there(levels: list[list[nn.Module]]) -> tuple[list[str], list[str]]:
        below = sorted({name for module in levels[-1] for name in module._modules})
        return below, difflib.get_close_matches(parts[len(levels) - 1], below, n=1)

    levels = max(reached, key=lambda levels: (len(levels), len(what_is_there(levels)[1])))
    below, close = what_is_there(levels)
    matched = ".".join(parts[: len(levels) - 1])
    where = f"{matched} matches {len(levels[-1])} ({names[levels[-1][0]]}, …)" if matched else "at the top of the model"
    return ConfigError(
        path,
        f"{pattern!r}, which matches no module",
        f"{where}; below it: {', '.join(below) or 'nothing'}",
        f"write {close[0]} for {parts[len(levels) - 1]}" if close else "mend the path; * stands for exactly one part",
    )
