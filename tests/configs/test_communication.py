"""What recipes/README.md says about communication is what the arithmetic gives."""

from __future__ import annotations

from tests.configs.communication_table import ROOT, lines, picked, rows

README = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
SMALL, LARGE = "llama3.1-8b_full_fsdp2_8x80gb", "llama3.1-70b_full_fsdp2-hybrid_64x80gb"


def test_the_tables_are_what_the_functions_give():
    for recipe, shard_ranks in ((SMALL, 8), (LARGE, 32)):
        assert "\n".join(lines(recipe, shard_ranks)) in README


def test_what_the_text_concludes_is_in_the_tables():
    seconds = {row.layout.sharding: row.traffic.seconds(400e9) for row in rows(SMALL, 4096, 8)}
    assert f"between {seconds['hybrid_shard']:.1f} s and {seconds['full_shard']:.1f} s" in README
    assert picked(rows(LARGE, 8, 32)) is None  # 70B does not fit on one node
    for ranks, best, at_50 in (
        (64, "full_shard", "full_shard"),
        (512, "hybrid_shard", "full_shard"),
        (4096, "hybrid_shard", "hybrid_shard"),
    ):
        found = rows(LARGE, ranks, 32)
        chosen = picked(found)
        assert chosen is not None
        assert chosen.layout.sharding == best
        pair = [row for row in found if row.layout.sharding in ("full_shard", "hybrid_shard")]
        assert min(pair, key=lambda row: row.traffic.seconds(50e9)).layout.sharding == at_50
        if ranks == 64:
            more = pair[1].traffic.node_bytes / pair[0].traffic.node_bytes - 1
            assert f"{100 * more:.0f} % more bytes" in README
