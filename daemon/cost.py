"""What is worth fetching: the part of a prefix that arrives sooner than the engine would recompute it.

Pure decisions over measured numbers. A *link* is one source's way here: its latency until the first byte and its
bandwidth, as exponentially weighted averages, and what is queued in front. A *prefill* is one engine's speed at
computing prompts, learned from its own reports. Averages move by a quarter with each observation, so that a link that
has become slow is noticed after a few fetches, and one odd measurement changes little.

What is not known is assumed in favour of fetching: a cache that never tries learns nothing. The first fetch over a link
is judged by `FIRST_BANDWIDTH`, and a link that was slow and has not been used since is believed to be quicker, the
longer the more; while an engine's speed is unknown every fetch pays. What such an attempt may cost is bounded by
`patience`: what falls behind computing by more than a quarter is given up, and computed.

A prefix may come from several sources at once, in consecutive ranges.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

WEIGHT: Final = 0.25  # of the newest observation
FIRST_LATENCY: Final = 1e-3  # s
FIRST_BANDWIDTH: Final = 500e6  # bytes/s
TOGETHER: Final = 16  # transfers that are looked back at for such as ran at the same time
SMALL: Final = 1 << 16  # transfers below this say something of latency and nothing of bandwidth
FRESH_S: Final = 30.0  # how long a speed is believed; after as long again, half of it
SLOWER: Final = 4.0  # times than was thought a link is at least that brings nothing in time
SPLIT_S: Final = 5e-3  # what one more range must save: it has a reservation and a question of its own
HALVINGS: Final = 24  # until the time is known in which several sources bring a prefix
ODD: Final = 4.0  # times the expected one: what a report beyond counts as
FASTEST: Final = 1e-10  # s for a token
SLOWEST: Final = 1e3
DEPTHS: Final = (0, 2048, 8192, 32768)  # tokens into a prompt at which a speed is shown
SLACK: Final = 0.25  # of the time that computing takes: how far a fetch may fall behind it
SLACK_S: Final = 0.25  # and at least so far: a busy machine's hiccup


class Speed(NamedTuple):
    """What a link is believed to do now."""

    latency: float
    bandwidth: float
    queued: int

    def estimate(self, nbytes: int) -> float:
        """Seconds until `nbytes` that are asked for now have come."""
        return self.latency + (self.queued + nbytes) / self.bandwidth

    def in_time(self, block_bytes: int, seconds: float) -> int:
        """Blocks that come within `seconds`."""
        return max(0, int((seconds - self.latency) * self.bandwidth - self.queued) // block_bytes)


@dataclass(slots=True)
class Link:
    """How fast one source is; changed by the loop's thread alone."""

    latency: float = FIRST_LATENCY
    bandwidth: float = FIRST_BANDWIDTH
    observed: int = 0
    queued: int = 0  # bytes that are asked for and have not come
    packed: float = 1.0  # bytes on the way for each of a payload
    clock: Callable[[], float] = time.monotonic
    heard: float = math.inf  # when it was observed last; inf: not yet
    _ended: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=TOGETHER))  # begin, end, bytes

    def observe(self, nbytes: int, seconds: float, first_byte: float, sent: int | None = None) -> None:
        """`nbytes` have come, in `seconds` from asking to now, the first of them after `first_byte` seconds.

        `sent`: as how many they crossed the link, which is fewer where they were packed; None: as they are.

        Transfers that run together share the link: what others brought meanwhile is added to this one's bytes, and the
        wait behind them is no latency.
        """
        now = self.clock()
        asked, begin = now - seconds, now - (seconds - first_byte)
        weight = 1 - (1 - WEIGHT) / self._older() if self.observed else 1.0
        alone = all(end <= asked for _, end, _ in self._ended)
        if alone or first_byte < self.latency:
            self.latency += weight * (max(0.0, first_byte) - self.latency)
        if nbytes >= SMALL and seconds > first_byte:
            meanwhile = sum(
                more * (end - max(begin, began)) / (end - began) for began, end, more in self._ended if end > begin
            )
            self.bandwidth += weight * ((nbytes + meanwhile) / (seconds - first_byte) - self.bandwidth)
            self.packed += weight * ((nbytes if sent is None else sent) / nbytes - self.packed)
            self.observed += 1
            self.heard = now
            self._ended.append((begin, now, nbytes))

    @property
    def speed(self) -> float | None:
        """Bytes a second on the way itself, however they are packed; None: it is not known yet."""
        return self.now().bandwidth * self.packed if self.observed else None

    def late(self, nbytes: int, seconds: float) -> None:
        """`nbytes` were under way, and in `seconds` nothing of use has come: it was given up.

        Says nothing where there was less time than they were thought to need.
        """
        now = self.now()
        if seconds > now.latency + nbytes / now.bandwidth:
            self.bandwidth = max(1.0, min(now.bandwidth / SLOWER, nbytes / seconds))
            self.observed += 1
            self.heard = self.clock()

    def now(self) -> Speed:
        """What it is believed to do. One that was slow long ago may be quick again: only trying shows that."""
        older = self._older()
        if older == 1.0:
            return Speed(self.latency, self.bandwidth, self.queued)
        latency = max(self.latency / older, min(self.latency, FIRST_LATENCY))
        return Speed(latency, min(self.bandwidth * older, max(self.bandwidth, FIRST_BANDWIDTH)), self.queued)

    def _older(self) -> float:
        """By what factor it may differ now from what was observed."""
        return float(2 ** min(64.0, max(0.0, (self.clock() - self.heard) / FRESH_S - 1.0)))

    def estimate(self, nbytes: int) -> float:
        """Seconds until `nbytes` that are asked for now have come."""
        return self.now().estimate(nbytes)

    def shown(self) -> dict[str, Any]:
        """For people."""
        latency, bandwidth, queued = self.now()
        return {"latency_ms": latency * 1e3, "bandwidth": bandwidth, "queued": queued, "observed": self.observed}


@dataclass(slots=True)
class Prefill:
    """How fast one engine computes prompts: seconds a token, which grow with the token's position.

    Attention looks back at all tokens before. A straight line is fitted to what is reported, through weighted means;
    positions that hardly differ say little of its slope, so that it is then taken for flat.
    """

    seconds: float = 0.0  # a token, at `position`; 0: not known yet
    position: float = 0.0
    variance: float = 0.0  # of positions
    covariance: float = 0.0  # of positions and seconds
    observed: int = 0

    def observe(self, tokens: int, seconds: float, position: int = 0) -> None:
        """The engine has computed `tokens` of a prompt, from `position` on, in `seconds`."""
        if tokens <= 0 or position < 0 or not FASTEST <= seconds / tokens <= SLOWEST:
            return
        each, middle = seconds / tokens, position + tokens / 2
        if not self.observed:
            self.seconds, self.position = each, middle
        else:
            expected = self.at(middle)
            each = min(max(each, expected / ODD), expected * ODD)
            there, slower = middle - self.position, each - self.seconds
            self.variance = (1 - WEIGHT) * (self.variance + WEIGHT * there * there)
            self.covariance = (1 - WEIGHT) * (self.covariance + WEIGHT * there * slower)
            self.position += WEIGHT * there
            self.seconds += WEIGHT * slower
        self.observed += 1

    @property
    def slope(self) -> float:
        """By how many seconds each token takes longer than the one before: never less than none, or than nothing."""
        if self.covariance <= 0:
            return 0.0
        return min(self.covariance / (self.variance + (self.position / 8) ** 2), self.seconds / self.position)

    def at(self, position: float) -> float:
        """Seconds for the token at `position`."""
        return max(FASTEST, self.seconds + self.slope * (position - self.position))

    def estimate(self, position: int, tokens: int) -> float | None:
        """Seconds to compute `tokens` from `position` on; None: not known yet."""
        return tokens * self.at(position + tokens / 2) if self.observed else None

    def shown(self) -> dict[str, Any]:
        """For people: the speed at several depths of a prompt; empty while it is not known."""
        return {"tokens_s": {str(depth): 1 / self.at(depth) for depth in DEPTHS}} if self.observed else {}


@dataclass(frozen=True, slots=True)
class Offer:
    """A source that has the `blocks` leading blocks of what is missing."""

    name: str
    blocks: int
    link: Link


@dataclass(frozen=True, slots=True)
class Range:
    """The blocks [start, end) of what is missing, from the offer of that number."""

    offer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to fetch from where, and why: consecutive ranges from the first missing block on, each offer's at most once.

    `fetch_s`: until all are here. `compute_s`: what the engine would take for them, where that is known.
    """

    ranges: tuple[Range, ...]
    fetch_s: float
    compute_s: float | None
    why: str

    @property
    def blocks(self) -> int:
        return self.ranges[-1].end if self.ranges else 0


@dataclass(frozen=True, slots=True)
class _Plan:
    ranges: tuple[Range, ...]
    seconds: float


def decide(
    offers: Sequence[Offer],
    *,
    block_bytes: int,
    block_tokens: int,
    position: int,
    prefill: Prefill,
    policy: str,
    deadline: float,
) -> Decision:
    """The ranges that save the engine most time; never later, as far as is known, than the best source alone.

    `position`: of the first missing token in the prompt. `policy`: "cost", "always" (the longest prefix, whatever it
    takes, within the deadline) or "never".
    """
    usable = [number for number, offer in enumerate(offers) if offer.blocks > 0]
    if policy == "never" or not usable:
        return Decision((), 0.0, None, "nothing is fetched: cluster.fetch" if usable else "no other node has more")
    speeds = [offer.link.now() for offer in offers]
    reasons: list[str] = []
    plans: list[_Plan] = []
    for number in usable:
        offer, speed = offers[number], speeds[number]
        count = min(offer.blocks, speed.in_time(block_bytes, deadline))
        plans.append(_Plan((Range(number, 0, count),), speed.estimate(count * block_bytes)))
        reasons.append(_told(offer, count, plans[-1].seconds, prefill.estimate(position, count * block_tokens)))
    if len(usable) > 1:
        # Who has least first: whoever has more can go on from there.
        order = sorted(usable, key=lambda number: offers[number].blocks)
        most = _within(offers, speeds, order, block_bytes, deadline)
        longest = most[-1].end if most else 0
        for length in {min(offers[number].blocks, longest) for number in usable} - {0}:
            plans.append(_together(offers, speeds, order, block_bytes, length, deadline))
    best: tuple[float, float] | None = None
    chosen: _Plan | None = None
    for plan in plans:
        count = plan.ranges[-1].end
        seconds = plan.seconds + SPLIT_S * (len(plan.ranges) - 1)
        compute = prefill.estimate(position, count * block_tokens)
        if policy == "always" or compute is None:
            worth = (float(count), -seconds)  # the longest, then the quickest
        else:
            worth = (compute - seconds, 0.0)
        if count and (policy == "always" or compute is None or seconds < compute) and (best is None or worth > best):
            best, chosen = worth, plan
    why = "; ".join(reasons)
    if chosen is None:
        return Decision((), 0.0, None, f"recomputing is quicker ({why})")
    names = ", then ".join(
        offers[one.offer].name + (f" for {one.end - one.start} blocks" if len(chosen.ranges) > 1 else "")
        for one in chosen.ranges
    )
    compute = prefill.estimate(position, chosen.ranges[-1].end * block_tokens)
    return Decision(chosen.ranges, chosen.seconds, compute, f"{names} ({why})")


def _told(offer: Offer, count: int, fetch: float, compute: float | None) -> str:
    told = f"{offer.name}: {count} of {offer.blocks} blocks in {fetch * 1e3:.1f} ms"
    return told + ("" if compute is None else f", computed in {compute * 1e3:.1f} ms")


def _within(
    offers: Sequence[Offer], speeds: Sequence[Speed], order: Sequence[int], block_bytes: int, seconds: float
) -> list[Range]:
    """The most that the offers can bring together within `seconds`. `order`: by what they have, least first."""
    ranges: list[Range] = []
    at = 0
    for number in order:
        end = min(offers[number].blocks, at + speeds[number].in_time(block_bytes, seconds))
        if end > at:
            ranges.append(Range(number, at, end))
            at = end
    return ranges


def _together(
    offers: Sequence[Offer],
    speeds: Sequence[Speed],
    order: Sequence[int],
    block_bytes: int,
    length: int,
    deadline: float,
) -> _Plan:
    """How `length` blocks, which can be had by the deadline, come soonest."""
    low, high = 0.0, deadline
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        some = _within(offers, speeds, order, block_bytes, middle)
        low, high = (low, middle) if some and some[-1].end >= length else (middle, high)
    ranges = tuple(
        Range(one.offer, one.start, min(one.end, length))
        for one in _within(offers, speeds, order, block_bytes, high)
        if one.start < length
    )
    return _Plan(ranges, max(speeds[one.offer].estimate((one.end - one.start) * block_bytes) for one in ranges))


def patience(prefill: Prefill, position: int, tokens: int, whole: int) -> float:
    """Seconds that a fetch of `whole` tokens from `position` on may take until its first `tokens` are here.

    Then computing would have got as far, and some slack: an engine that computes whatever is not here by then has its
    first token at most so much later than one that has fetched nothing.
    """
    ahead, all_of_it = prefill.estimate(position, tokens), prefill.estimate(position, whole)
    if ahead is None or all_of_it is None:
        return math.inf
    return ahead + max(SLACK_S, SLACK * all_of_it)
