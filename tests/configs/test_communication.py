"""What recipes/README.md says about communication is what the arithmetic gives."""

from __future__ import annotations

import re

import pytest

from tests.configs.communication_table import ROOT, lines, picked, rows

README = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
TABLES = (("llama3.1-8b_full_fsdp2_8x80gb", 8), ("llama3.1-70b_full_fsdp2-hybrid_64x80gb", 32))


@pytest.mark.parametrize(("recipe", "shard_ranks"), TABLES)
def test_the_tables_are_what_the_functions_give(recipe: str, shard_ranks: int):
    assert "\n".join(lines(recipe, shard_ranks)) in README


def test_the_numbers_in_the_text_are_those_of_the_tables():
    small = {row.layout.sharding: row.traffic for row in rows("llama3.1-8b_full_fsdp2_8x80gb", 4096, 8)}
    hybrid, full = (small[name].seconds(400e9) for name in ("hybrid_shard", "full_shard"))
    assert f"between {hybrid:.1f} s and {full:.1f} s" in README
    for ranks, at_50 in ((64, "full_shard"), (512, "full_shard"), (4096, "hybrid_shard")):
        large = {row.layout.sharding: row for row in rows(TABLES[1][0], ranks, 32)}
        pair = [large[name] for name in ("full_shard", "hybrid_shard")]
        assert min(pair, key=lambda row: row.traffic.seconds(50e9)).layout.sharding == at_50
        best = picked(list(large.values()))
        assert best is not None
        assert best.layout.sharding == ("full_shard" if ranks == 64 else "hybrid_shard")
        if ranks == 64:
            more = pair[1].traffic.node_bytes / pair[0].traffic.node_bytes
            assert f"{more - 1:.0%}".replace("%", " %") + " more bytes" in README
            recipe = (ROOT / "recipes" / f"{TABLES[1][0]}.yaml").read_text(encoding="utf-8")
            assert f"sends {1 - 1 / more:.0%}".replace("%", " %") in re.sub(r"\n# ", " ", recipe)


def test_70b_is_not_for_one_node():
    assert picked(rows(TABLES[1][0], 8, 32)) is None
