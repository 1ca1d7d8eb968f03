"""The cost model: measured speeds in, the part that pays out."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.daemon.cost import (
    FIRST_BANDWIDTH,
    FRESH_S,
    SLACK,
    SLACK_S,
    SPLIT_S,
    Decision,
    Link,
    Offer,
    Prefill,
    Range,
    decide,
    patience,
)

BLOCK = 1 << 20
SHAPE = {"block_bytes": BLOCK, "block_tokens": 16, "position": 0}


def link(latency: float, bandwidth: float, queued: int = 0) -> Link:
    return Link(latency, bandwidth, 1, queued)


def prefill(rate: float) -> Prefill:
    one = Prefill()
    one.observe(1, 1 / rate)
    return one


def alone(*counts: int) -> tuple[Range, ...]:
    """The one range of the offer that has a count."""
    return tuple(Range(number, 0, count) for number, count in enumerate(counts) if count)


links = st.builds(link, st.floats(0, 1), st.floats(1e3, 1e11), st.integers(0, 1 << 34))
offers = st.lists(st.builds(Offer, st.just("one"), st.integers(0, 4096), links), max_size=4)
rates = st.floats(1, 1e7)
deadlines = st.floats(0.01, 60)


def takes(decision: Decision, found: list[Offer]) -> float:
    """Seconds until the last range has come, by the links' own estimates."""
    return max(found[one.offer].link.estimate((one.end - one.start) * BLOCK) for one in decision.ranges)


@given(offers, rates, deadlines)
def test_nothing_is_fetched_that_would_be_computed_sooner(found: list[Offer], rate: float, deadline: float) -> None:
    decision = decide(found, prefill=prefill(rate), policy="cost", deadline=deadline, **SHAPE)
    if decision.ranges:
        assert decision.fetch_s == pytest.approx(takes(decision, found))
        assert takes(decision, found) < decision.blocks * 16 / rate
        assert takes(decision, found) <= deadline * 1.001
        assert decision.compute_s == pytest.approx(decision.blocks * 16 / rate)


@given(offers, rates, st.sampled_from(["cost", "always"]), deadlines)
def test_ranges_follow_each_other_and_each_source_has_what_it_is_asked_for(
    found: list[Offer], rate: float, policy: str, deadline: float
) -> None:
    decision = decide(found, prefill=prefill(rate), policy=policy, deadline=deadline, **SHAPE)
    for one, after in itertools.pairwise(decision.ranges):
        assert one.end == after.start
    for one in decision.ranges:
        assert one.start < one.end <= found[one.offer].blocks
    assert not decision.ranges or decision.ranges[0].start == 0
    assert len({one.offer for one in decision.ranges}) == len(decision.ranges)


@given(offers, rates, deadlines)
def test_several_sources_are_never_later_than_the_best_alone(found: list[Offer], rate: float, deadline: float) -> None:
    """Of what they save: they may take longer where they bring more."""
    engine = prefill(rate)

    def saved(among: list[Offer]) -> float:
        decision = decide(among, prefill=engine, policy="cost", deadline=deadline, **SHAPE)
        if not decision.ranges:
            return 0.0
        assert decision.compute_s is not None
        return decision.compute_s - decision.fetch_s

    best = max((saved([one]) for one in found), default=0.0)
    assert saved(found) >= best * (1 - 1e-9)


@given(offers, deadlines)
def test_always_means_as_much_as_any_source_alone_brings(found: list[Offer], deadline: float) -> None:
    together = decide(found, prefill=Prefill(), policy="always", deadline=deadline, **SHAPE)
    for one in found:
        assert together.blocks >= decide([one], prefill=Prefill(), policy="always", deadline=deadline, **SHAPE).blocks
    if together.ranges:
        assert takes(together, found) <= deadline * 1.001


@given(offers, st.sampled_from(["cost", "always", "never"]), deadlines)
def test_every_decision_says_why(found: list[Offer], policy: str, deadline: float) -> None:
    assert decide(found, prefill=Prefill(), policy=policy, deadline=deadline, **SHAPE).why


def test_a_source_that_saves_most_time_serves_alone_where_others_would_not_help() -> None:
    slow, fast, short = link(0.5, 1e8), link(0.001, 1e9), link(0.3, 1e10)
    found = [Offer("slow", 100, slow), Offer("fast", 100, fast), Offer("short", 10, short)]
    decision = decide(found, prefill=prefill(1000), policy="cost", deadline=5, **SHAPE)
    assert decision.ranges == alone(0, 100, 0)
    assert decision.why.startswith("fast (")
    assert "computed in 1600.0 ms" in decision.why


def test_two_sources_that_are_as_fast_share_the_work() -> None:
    found = [Offer("redis", 100, link(0.001, 1e8)), Offer("node a", 100, link(0.001, 1e8))]
    decision = decide(found, prefill=prefill(100), policy="cost", deadline=5, **SHAPE)
    assert decision.ranges == (Range(0, 0, 50), Range(1, 50, 100))
    assert decision.fetch_s == pytest.approx(0.001 + 50 * BLOCK / 1e8)
    assert decision.why.startswith("redis for 50 blocks, then node a for 50 blocks (")


def test_whoever_has_more_goes_on_where_the_other_ends() -> None:
    """A fast source with the first half, a slow one with all of it."""
    found = [Offer("slow", 100, link(0.0, 50 * BLOCK)), Offer("fast", 60, link(0.0, 1e12))]
    decision = decide(found, prefill=prefill(100), policy="cost", deadline=5, **SHAPE)
    assert decision.ranges == (Range(1, 0, 60), Range(0, 60, 100))
    assert decision.fetch_s == pytest.approx(0.8)


def test_sources_together_bring_before_the_deadline_what_none_could_alone() -> None:
    found = [Offer("one", 100, link(0.0, 10 * BLOCK)), Offer("two", 100, link(0.0, 20 * BLOCK))]
    decision = decide(found, prefill=prefill(1), policy="cost", deadline=2.0001, **SHAPE)
    assert decision.blocks == 60


def test_another_source_is_not_asked_for_what_saves_next_to_nothing() -> None:
    found = [Offer("fast", 100, link(0.001, 1e11)), Offer("other", 100, link(0.0, 1e11))]
    assert len(decide(found, prefill=prefill(100), policy="cost", deadline=5, **SHAPE).ranges) == 1
    assert SPLIT_S > 100 * BLOCK / 1e11


def test_a_queue_in_front_makes_a_source_later() -> None:
    found = [Offer("busy", 100, link(0.001, 1e9, queued=10**10)), Offer("idle", 100, link(0.001, 5e8))]
    assert decide(found, prefill=prefill(1000), policy="cost", deadline=60, **SHAPE).ranges == alone(0, 100)


def test_only_what_comes_before_the_deadline_is_fetched() -> None:
    found = [Offer("one", 100, link(0.0, 1 << 20))]
    assert decide(found, prefill=prefill(1), policy="cost", deadline=10, **SHAPE).ranges == alone(10)


def test_an_engine_whose_speed_is_not_known_fetches_the_longest_prefix() -> None:
    found = [Offer("short", 10, link(0.5, 1e10)), Offer("long", 20, link(0.1, 1e8))]
    assert decide(found, prefill=Prefill(), policy="cost", deadline=5, **SHAPE).ranges == alone(0, 20)


def test_the_operator_may_always_or_never_fetch() -> None:
    found = [Offer("slow", 10, link(0.1, 1e7))]
    quick = prefill(1e9)
    assert decide(found, prefill=quick, policy="cost", deadline=5, **SHAPE).ranges == ()
    assert decide(found, prefill=quick, policy="always", deadline=5, **SHAPE).ranges == alone(10)
    assert decide(found, prefill=Prefill(), policy="never", deadline=5, **SHAPE).ranges == ()


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
    assert engine.estimate(0, 100) is None
    engine.observe(1000, 2.0)
    assert engine.estimate(0, 100) == pytest.approx(0.2)


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


def test_what_does_not_come_makes_a_link_slow() -> None:
    """Also where nothing at all has come, so that there is nothing to measure."""
    one = Link(clock=lambda: 0.0)
    one.late(8 * BLOCK, 2.0)
    assert one.bandwidth == 4 * BLOCK
    one.late(8 * BLOCK, 3.0)
    assert one.bandwidth == BLOCK
    one.late(8 * BLOCK, 3.0)  # it would have taken eight
    one.late(BLOCK, 0.0)
    one.late(BLOCK, -1.0)
    assert one.bandwidth == BLOCK
    for _ in range(200):
        one.late(BLOCK, 1e7)
    assert one.bandwidth == 1.0


@given(st.floats(1, 1e11), st.floats(1e-6, 10), st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_link_is_believed_to_be_no_slower_the_longer_it_was_not_used(
    bandwidth: float, latency: float, idle: float, more: float
) -> None:
    now = 0.0
    one = Link(latency, bandwidth, 1, clock=lambda: now, heard=0.0)
    times = []
    for passed in (0.0, idle, more):
        now += passed
        times.append(one.estimate(BLOCK))
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(latency + BLOCK / bandwidth)
    assert one.now().bandwidth <= max(bandwidth, FIRST_BANDWIDTH)
    assert one.now().latency <= latency


def test_a_link_that_was_slow_is_tried_again_after_a_while_and_what_it_does_then_counts_more() -> None:
    now = 0.0
    one = Link(0.001, 1e5, 1, clock=lambda: now, heard=0.0)
    engine, found = prefill(250), [Offer("one", 125, one)]

    def fetched() -> bool:
        return bool(decide(found, prefill=engine, policy="cost", deadline=60, **SHAPE).ranges)

    now = FRESH_S
    assert not fetched()
    now = 20 * FRESH_S
    assert fetched()
    one.observe(10**8, 0.101, 0.001)
    assert one.bandwidth == pytest.approx(1e9, rel=0.01)
    assert one.now().bandwidth == one.bandwidth


def test_measurements_that_cannot_be_change_nothing_for_the_worse() -> None:
    """A clock that jumps, or a transfer of no time."""
    one, engine = Link(), Prefill()
    one.observe(10**8, 0.0, 0.0)
    one.observe(10**8, -1.0, -1.0)
    assert one.latency >= 0 and one.bandwidth > 0
    for tokens, seconds, position in (
        (0, 1.0, 0), (-5, 1.0, 0), (10, 0.0, 0), (10, -1.0, 0), (10, math.nan, 0), (10, math.inf, 0), (10, 1.0, -1),
        (1 << 32, 1e-6, 0), (1, 1e9, 0),
    ):  # fmt: skip
        engine.observe(tokens, seconds, position)
    assert engine == Prefill()


# ---- an engine's speed by position


def taken(base: float, slope: float, position: int, tokens: int) -> float:
    """What computing takes where each token costs `base`, and `slope` more for each token before it."""
    return base * tokens + slope * (position * tokens + tokens * tokens / 2)


prompts = st.lists(st.tuples(st.integers(0, 60_000), st.integers(64, 60_000)), min_size=1, max_size=60)


@given(st.floats(1e-6, 1e-2), st.integers(10_000, 10**9), prompts, st.integers(0, 100_000), st.integers(1, 100_000))
def test_an_engine_that_takes_longer_for_later_tokens_is_learned(
    base: float, doubled: int, seen: list[tuple[int, int]], position: int, tokens: int
) -> None:
    """`doubled`: where in a prompt a token takes twice as long as the first one."""
    engine, slope = Prefill(), base / doubled
    for one in [*seen, (0, 500), (0, 30_000), (30_000, 30_000), (0, 8000), (4000, 200)] * 4:
        engine.observe(one[1], taken(base, slope, *one), one[0])
    estimate = engine.estimate(position, tokens)
    assert estimate is not None
    assert estimate == pytest.approx(taken(base, slope, position, tokens), rel=0.5)


def test_the_tail_of_a_long_prompt_takes_longer_than_its_head() -> None:
    engine = Prefill()
    for number in range(40):
        prompt = 1000 + 30_000 * (number % 5)
        engine.observe(prompt, taken(1e-4, 1e-8, 0, prompt))
    head, tail = engine.estimate(0, 1000), engine.estimate(100_000, 1000)
    assert head is not None and tail is not None
    assert head == pytest.approx(0.105, rel=0.25)
    assert tail == pytest.approx(1.105, rel=0.2)
    # So that a slow link is worth it for the tail alone.
    found = [Offer("one", 100, link(0.0, 10 * BLOCK))]
    shape = {"block_bytes": BLOCK, "block_tokens": 160, "deadline": 60, "policy": "cost", "prefill": engine}
    assert not decide(found, position=0, **shape).ranges
    assert decide(found, position=100_000, **shape).ranges == alone(100)


def test_prompts_of_one_length_say_nothing_of_the_position() -> None:
    engine = Prefill()
    for number in range(100):
        engine.observe(2000 + number % 3, 2.0 + 0.1 * (number % 7))
    assert engine.at(0) == pytest.approx(engine.at(100_000), rel=0.3)


reports = st.tuples(st.integers(1, 1 << 32), st.floats(1e-6, 1e6), st.integers(0, 1 << 32))


@given(st.lists(reports, min_size=1, max_size=100), st.integers(0, 1 << 33), st.integers(1, 1 << 33))
def test_whatever_an_engine_reports_its_speed_stays_a_speed(
    seen: list[tuple[int, float, int]], position: int, tokens: int
) -> None:
    engine = Prefill()
    for one in seen:
        engine.observe(*one)
    if engine.observed:
        estimate = engine.estimate(position, tokens)
        assert estimate is not None and math.isfinite(estimate) and estimate > 0
        assert engine.at(position) >= engine.at(0) > 0


def test_one_odd_report_changes_little() -> None:
    """An engine that was stopped for an hour in the middle of a prompt."""
    engine = Prefill()
    for seconds in (1.0, 1.0, 3600.0):
        engine.observe(1000, seconds)
    assert engine.at(500) < 2 / 1000
    for _ in range(20):
        engine.observe(1000, 10.0)  # one that has become ten times slower is believed after a few
    assert engine.at(500) == pytest.approx(0.01, rel=0.05)


# ---- how long is waited


@given(st.floats(1, 1e6), st.integers(1, 1000), st.integers(0, 1000))
def test_whoever_gives_up_what_is_late_is_late_by_a_bounded_share(rate: float, blocks: int, came: int) -> None:
    came = min(came, blocks)
    engine, whole = prefill(rate), blocks * 16
    waited = patience(engine, 0, came * 16, whole)
    all_computed, rest = whole / rate, (whole - came * 16) / rate
    assert waited + rest <= all_computed + max(SLACK_S, SLACK * all_computed) + 1e-9


def test_an_engine_whose_speed_is_not_known_waits_until_the_deadline() -> None:
    assert patience(Prefill(), 0, 16, 160) == math.inf


def test_a_link_is_as_fast_as_what_crosses_it() -> None:
    """That a packed payload comes sooner must not make the link a fast one, and the next one raw."""
    seconds = itertools.count(0.0, 2.0)
    one = Link(clock=lambda: next(seconds))
    assert one.speed is None
    for _ in range(5):
        one.observe(10**8, 1.01, 0.01, 5 * 10**7)
    assert one.bandwidth == pytest.approx(10**8) and one.speed == pytest.approx(5 * 10**7, rel=0.01)
