"""The cost model: measured speeds in, the part that pays out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.daemon.cost import FIRST_BANDWIDTH, Link, Offer, Prefill, decide

SHAPE = {"block_bytes": 1 << 20, "block_tokens": 16}


def link(latency: float, bandwidth: float, queued: int = 0) -> Link:
    return Link(latency, bandwidth, 1, queued)


def prefill(rate: float) -> Prefill:
    return Prefill(rate, 1)


links = st.builds(link, st.floats(0, 1), st.floats(1e3, 1e11), st.integers(0, 1 << 34))
offers = st.lists(st.builds(Offer, st.just("one"), st.integers(0, 4096), links), max_size=4)


@given(offers, st.floats(1, 1e7), st.floats(0.01, 60))
def test_nothing_is_fetched_that_would_be_computed_sooner(found: list[Offer], rate: float, deadline: float) -> None:
    decision = decide(found, prefill=prefill(rate), policy="cost", deadline=deadline, **SHAPE)
    assert len(decision.counts) == len(found)
    for count, offer in zip(decision.counts, found, strict=True):
        assert 0 <= count <= offer.blocks
        if count:
            assert offer.link.estimate(count << 20) < count * 16 / rate
            assert offer.link.estimate(count << 20) <= deadline * 1.001
            assert decision.compute_s is not None and decision.fetch_s < decision.compute_s
    assert sum(count > 0 for count in decision.counts) <= 1


@given(offers, st.sampled_from(["cost", "always", "never"]), st.floats(0.01, 60))
def test_every_decision_says_why(found: list[Offer], policy: str, deadline: float) -> None:
    assert decide(found, prefill=Prefill(), policy=policy, deadline=deadline, **SHAPE).why


def test_the_source_that_saves_most_time_is_chosen() -> None:
    slow, fast, short = link(0.01, 1e8), link(0.001, 1e9), link(0.0001, 1e10)
    found = [Offer("slow", 100, slow), Offer("fast", 100, fast), Offer("short", 10, short)]
    decision = decide(found, prefill=prefill(1000), policy="cost", deadline=5, **SHAPE)
    assert decision.counts == (0, 100, 0)
    assert decision.why.startswith("fast (")
    assert "computed in 1600.0 ms" in decision.why


def test_a_queue_in_front_makes_a_source_later() -> None:
    found = [Offer("busy", 100, link(0.001, 1e9, queued=10**10)), Offer("idle", 100, link(0.001, 5e8))]
    assert decide(found, prefill=prefill(1000), policy="cost", deadline=60, **SHAPE).counts == (0, 100)


def test_only_what_comes_before_the_deadline_is_fetched() -> None:
    found = [Offer("one", 100, link(0.0, 1 << 20))]
    assert decide(found, prefill=prefill(1), policy="cost", deadline=10, **SHAPE).counts == (10,)


def test_an_engine_whose_speed_is_not_known_fetches_the_longest_prefix() -> None:
    found = [Offer("short", 10, link(0.0, 1e10)), Offer("long", 20, link(0.1, 1e8))]
    assert decide(found, prefill=Prefill(), policy="cost", deadline=5, **SHAPE).counts == (0, 20)


def test_the_operator_may_always_or_never_fetch() -> None:
    found = [Offer("slow", 10, link(0.1, 1e7))]
    quick = prefill(1e9)
    assert decide(found, prefill=quick, policy="cost", deadline=5, **SHAPE).counts == (0,)
    assert decide(found, prefill=quick, policy="always", deadline=5, **SHAPE).counts == (10,)
    assert decide(found, prefill=Prefill(), policy="never", deadline=5, **SHAPE).counts == (0,)


def test_speeds_are_learned_and_follow_what_changes() -> None:
    now = 0.0
    one = Link(clock=lambda: now)
    one.observe(10**8, 1.01, 0.01)
    assert (one.latency, one.bandwidth) == (pytest.approx(0.01), pytest.approx(1e8))
    for _ in range(20):
        now += 2.0
        one.observe(10**7, 1.2, 0.2)
    assert (one.latency, one.bandwidth) == (pytest.approx(0.2, rel=0.05), pytest.approx(1e7, rel=0.05))
    engine = Prefill()
    assert engine.estimate(100) is None
    engine.observe(1000, 2.0)
    assert engine.estimate(100) == pytest.approx(0.2)


def test_transfers_that_run_together_share_the_link() -> None:
    """Four batches of 10 MB at 100 MB/s, each of which takes four times as long as it would alone."""
    now = 0.0
    one = Link(clock=lambda: now)
    for _ in range(10):
        now += 10.0  # idle in between
        for number in range(4):
            now += 0.41 if number == 0 else 0.0
            one.observe(10**7, 0.41, 0.01)
    assert 0.5e8 < one.bandwidth < 1.1e8
    assert one.latency == pytest.approx(0.01)


def test_the_wait_behind_other_transfers_is_no_latency() -> None:
    now = 0.0
    one = Link(clock=lambda: now)
    for number in range(20):
        now = 0.01 + 0.1 * (number + 1)
        one.observe(10**7, now, 0.01 + 0.1 * number)  # all asked for at once, one after the other
    assert one.latency == pytest.approx(0.01)
    assert one.bandwidth == pytest.approx(1e8)


def test_a_small_transfer_says_nothing_of_bandwidth() -> None:
    one = Link()
    one.observe(100, 0.5, 0.001)
    assert one.bandwidth == FIRST_BANDWIDTH


def test_measurements_that_cannot_be_change_nothing_for_the_worse() -> None:
    """A clock that jumps, or a transfer of no time."""
    one, engine = Link(), Prefill()
    one.observe(10**8, 0.0, 0.0)
    one.observe(10**8, -1.0, -1.0)
    engine.observe(0, 1.0)
    engine.observe(10, -1.0)
    assert one.latency >= 0 and one.bandwidth > 0 and engine.rate == 0
