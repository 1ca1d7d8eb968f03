"""What is worth fetching: the part of a prefix that arrives sooner than the engine would recompute it.

Pure decisions over measured numbers. A *link* is one source's way here: its latency until the first byte and its
bandwidth, as exponentially weighted averages, and what is queued in front. A *prefill* is one engine's speed at
computing prompts, learned from its own reports. Averages move by a quarter with each observation, so that a link that
has become slow is noticed after a few fetches, and one odd measurement changes little.

What is not known is assumed in favour of fetching: a cache that never tries learns nothing. The first fetch over a link
is judged by `FIRST_BANDWIDTH`; while an engine's speed is unknown every fetch pays.

Later tokens of a prompt cost more to compute than earlier ones (attention looks back at all before them); a rate that
is learned from whole prompts averages over that. For the tail, which is what is fetched, it errs towards recomputing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

WEIGHT: Final = 0.25  # of the newest observation
FIRST_LATENCY: Final = 1e-3  # s
FIRST_BANDWIDTH: Final = 500e6  # bytes/s
TOGETHER: Final = 16  # transfers that are looked back at for such as ran at the same time
SMALL: Final = 1 << 16  # transfers below this say something of latency and nothing of bandwidth


@dataclass(slots=True)
class Link:
    """How fast one source is; changed by the loop's thread alone."""

    latency: float = FIRST_LATENCY
    bandwidth: float = FIRST_BANDWIDTH
    observed: int = 0
    queued: int = 0  # bytes that are asked for and have not come
    clock: Callable[[], float] = time.monotonic
    _ended: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=TOGETHER))  # begin, end, bytes

    def observe(self, nbytes: int, seconds: float, first_byte: float) -> None:
        """`nbytes` have come, in `seconds` from asking to now, the first of them after `first_byte` seconds.

        Transfers that run together share the link: what others brought meanwhile is added to this one's bytes, and the
        wait behind them is no latency.
        """
        now = self.clock()
        asked, begin = now - seconds, now - (seconds - first_byte)
        weight = WEIGHT if self.observed else 1.0
        alone = all(end <= asked for _, end, _ in self._ended)
        if alone or first_byte < self.latency:
            self.latency += weight * (max(0.0, first_byte) - self.latency)
        if nbytes >= SMALL and seconds > first_byte:
            meanwhile = sum(
                more * (end - max(begin, began)) / (end - began) for began, end, more in self._ended if end > begin
            )
            self.bandwidth += weight * ((nbytes + meanwhile) / (seconds - first_byte) - self.bandwidth)
            self.observed += 1
            self._ended.append((begin, now, nbytes))

    def estimate(self, nbytes: int) -> float:
        """Seconds until `nbytes` that are asked for now have come."""
        return self.latency + (self.queued + nbytes) / self.bandwidth


@dataclass(slots=True)
class Prefill:
    """How fast one engine computes prompts, in tokens a second; 0: not known yet."""

    rate: float = 0.0
    observed: int = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """The engine has computed `tokens` of a prompt in `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        weight = WEIGHT if self.observed else 1.0
        self.rate += weight * (tokens / seconds - self.rate)
        self.observed += 1

    def estimate(self, tokens: int) -> float | None:
        """Seconds to compute `tokens`; None: not known yet."""
        return tokens / self.rate if self.rate else None


@dataclass(frozen=True, slots=True)
class Offer:
    """A source that has the `blocks` leading blocks of what is missing."""

    name: str
    blocks: int
    link: Link


@dataclass(frozen=True, slots=True)
class Decision:
    """How many leading blocks to fetch from each offer (of at most one: what is fetched arrives in one order), and why.

    `fetch_s`: until they are here. `compute_s`: what the engine would take for them, where that is known.
    """

    counts: tuple[int, ...]
    fetch_s: float
    compute_s: float | None
    why: str


def decide(
    offers: Sequence[Offer],
    *,
    block_bytes: int,
    block_tokens: int,
    prefill: Prefill,
    policy: str,
    deadline: float,
) -> Decision:
    """The offer, and how much of it, that saves the engine most time.

    `policy`: "cost", "always" (the longest prefix, whatever it takes, within the deadline) or "never".
    """
    nothing = (0,) * len(offers)
    usable = [number for number, offer in enumerate(offers) if offer.blocks > 0]
    if policy == "never" or not usable:
        return Decision(nothing, 0.0, None, "nothing is fetched: cluster.fetch" if usable else "no other node has more")
    best: tuple[float, int, int] | None = None
    reasons: list[str] = []
    for number in usable:
        offer = offers[number]
        count = min(offer.blocks, _in_time(offer.link, block_bytes, deadline))
        fetch = offer.link.estimate(count * block_bytes)
        compute = prefill.estimate(count * block_tokens)
        told = f"{offer.name}: {count} of {offer.blocks} blocks in {fetch * 1e3:.1f} ms"
        told += "" if compute is None else f", computed in {compute * 1e3:.1f} ms"
        reasons.append(told)
        if not count:
            continue
        if policy == "always" or compute is None:
            saved = count * block_tokens - fetch  # the longest, then the quickest
        else:
            saved = compute - fetch
            if saved <= 0:
                continue
        if best is None or saved > best[0]:
            best = (saved, number, count)
    why = "; ".join(reasons)
    if best is None:
        return Decision(nothing, 0.0, None, f"recomputing is quicker ({why})")
    _, chosen, count = best
    counts = tuple(count if number == chosen else 0 for number in range(len(offers)))
    return Decision(
        counts,
        offers[chosen].link.estimate(count * block_bytes),
        prefill.estimate(count * block_tokens),
        f"{offers[chosen].name} ({why})",
    )


def _in_time(link: Link, block_bytes: int, deadline: float) -> int:
    """Blocks that a link brings before the deadline, as far as is known."""
    return max(0, int((deadline - link.latency) * link.bandwidth - link.queued) // block_bytes)
