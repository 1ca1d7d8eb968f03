"""Two and more engines on one daemon: what they share, what must never meet, and what trouble costs them."""

from engines.scripted import prompt


def test_one_engine_loads_what_another_has_stored(daemon, start_engine):
    first, second = start_engine(daemon), start_engine(daemon)
    tokens = prompt("document", 8)
    assert first.store(tokens) == {"states": ["SLOT"] * 8, "ready": 8}
    assert second.fetch(tokens) == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [1] * 8}
    assert second.store(tokens) == {"states": ["HERE"] * 8, "ready": 0}
