"""A recipe on other ranks than its own."""

from __future__ import annotations

from typing import Any

from lit_fsdp.errors import ConfigError


def put_ranks(values: dict[str, Any], ranks: int | None, nodes: int | None) -> None:
    """Set ``trainer.devices`` and ``trainer.num_nodes`` of a merged recipe, in place.

    Args:
        values: The merged recipe.
        ranks: All ranks; None keeps the recipe's, which must then be a number.
        nodes: Nodes they are spread over evenly; None: one, or the recipe's if ``ranks`` is None too.

    Raises:
        ConfigError: No ranks at all, an uneven spread, or a recipe that leaves the number to the machine.
    """
    trainer = values.get("trainer")
    trainer = values["trainer"] = dict(trainer) if isinstance(trainer, dict) else {} if trainer is None else trainer
    if not isinstance(trainer, dict):
        return  # refused where the recipe is checked
    for name, given in (("--ranks", ranks), ("--nodes", nodes)):
        if given is not None and given < 1:
            raise ConfigError(name, given, "a whole number >= 1", f"write {name} 2")
    if ranks is None:
        devices = trainer.get("devices")
        if nodes is not None:
            raise ConfigError("--nodes", f"{nodes} without --ranks", "both, or neither", "add --ranks N")
        if not isinstance(devices, list) and (not isinstance(devices, int) or devices < 1):
            raise ConfigError(
                "trainer.devices", repr(devices), "a number of ranks to audit for", "add --ranks N to the command"
            )
        return
    nodes = nodes or 1
    if ranks % nodes:
        raise ConfigError(
            "--nodes", f"{nodes} for {ranks} ranks", f"a divisor of {ranks}", f"write --ranks {ranks // nodes * nodes}"
        )
    trainer["devices"], trainer["num_nodes"] = ranks // nodes, nodes
