"""Blocks that lie elsewhere: asks Redis and the other nodes for the rest of a prefix, and fetches what pays.

A lookup that finds part of a chain here opens a *question* for the rest: one round trip to Redis (which of the blocks
it has; which nodes may have them), one to the nodes that are named. From the answers and measured speeds the cost model
decides what arrives sooner than the engine would recompute it, and from where: each source brings one range of it, all
at the same time. That part is fetched as any engine would store it: slots are reserved, so that every later lookup
counts on the blocks and nobody fetches or stores them a second time; data threads receive straight into the slots and
prove what they received; the leading run that is good is committed, the rest is given up.

The rules:

- An error is no answer: it is remembered for a moment, so that a request is not kept asking, and never as an absence.
- A prefix ends at the first block that cannot be had, of whichever range. Positions never shift.
- A fetch that falls behind computing is given up: it keeps nobody waiting for long.
- A value that has proved false is taken away where it lies; trouble on the way is no such proof.
- Only blocks with cryptographic hashes are asked for or given: others are no proof of which tokens they stand for.
- A node fetches for its own engines, never for another node.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from kvcascade.config.errors import CascadeError, TierUnavailable
from kvcascade.config.settings import ClusterSettings
from kvcascade.tiers.block import CRYPTOGRAPHIC
from kvcascade.tiers.remote import BlockName, Fetch, contradicts, disproves
from kvcascade.tiers.workers import outlast

from .cache import Cache
from .cost import SMALL, Decision, Link, Offer, Prefill, Range, decide, patience
from .lease import Attachment, Writer
from .plans import Space
from .protocol import MOST_LISTED, BlockState, Tier
from .transfer import Transfer

log = logging.getLogger("kvcascade.remote")

T = TypeVar("T")

BATCH_BYTES = 8 << 20  # so that the first blocks of a long prefix are ready before the last have come
BATCH_S = 0.1  # of a link's time: what is cut off in the middle of a batch came for nothing
NEW_LINK = 4  # times smaller are the batches over a link whose speed is not known
BATCHES = 4  # of one range under way at once: the next one waits at the source when one has come
GIVEN_UP = "computing is quicker by now"
FORGETTING = 16  # calls at once that take false values away
ANSWER_SHARE = 0.5  # of a question's time is for the answer of a source that has nothing to wait for
ANSWER_S = 0.25  # and at least so much of it, where there is more
ANSWER_MOST = 0.8  # but never all: a source that is late says so itself, in time for the others' answers to be used
ABSENT_S = 1.0  # how long an answer holds that there is nothing, or nothing that pays
ERROR_S = 0.2  # and that no answer came
QUESTIONS = 4096  # remembered at most
MOST_BLOCKS = 16384  # of one question; what lies behind is asked for when these are here
PREFILLS = 1024  # engines whose speed is remembered


Asked = tuple[int, bytes, str, bytes]  # space, last hash, the engine's name, ticket


class Source(Protocol):
    """Where blocks may lie: Redis, or the other nodes. All of its methods are called on the loop's thread."""

    tier: Tier

    async def find(self, space: Space, hashes: bytes, ticket: bytes, timeout: float) -> list["Found"]:
        """Who has leading blocks of `hashes`, a piece of a chain. CascadeError when that cannot be told now.

        It gives up after `timeout` seconds, and the moment that its threads take to let go; where blocks that a ticket
        names are still being stored, after half as many more.
        """


@dataclass(frozen=True, slots=True)
class Found:
    """One place that has the `blocks` leading blocks of what was asked for, and how to fetch from there."""

    name: str
    tier: Tier
    blocks: int
    link: Link
    fetch: Callable[[Sequence[Fetch], float], Awaitable[list[str | None]]]
    # Takes values away that have proved false; None where nothing is stored but only served.
    forget: Callable[[Sequence[BlockName]], Awaitable[None]] | None = None


@dataclass(eq=False, slots=True)
class Question:
    """What became of the blocks from `first` on of one chain: being asked for, or answered by a decision."""

    space: Space
    first: int
    task: "asyncio.Task[None]"
    expires: float = float("inf")
    decision: Decision | None = None
    error: str = ""

    @property
    def asking(self) -> bool:
        return not self.task.done()


@dataclass(eq=False, slots=True)
class _Prefix:
    """The blocks [first, end) of one chain on their way; `end` moves up to where it breaks off."""

    space: Space
    hashes: bytes
    first: int
    end: int
    begun: float
    deadline: float
    patience: Callable[[int], float]  # seconds until the blocks above this one must have come
    batches: list[tuple[int, "asyncio.Task[list[str | None]]"]] = field(default_factory=list)  # by their first block
    cut: bool = False


@dataclass(eq=False, slots=True)
class _Fetching:
    """One range of a prefix: its reservation and the places of its blocks."""

    prefix: _Prefix
    attachment: Attachment
    writer: Writer
    lease: int
    blocks: list[int]  # indices in the chain
    pages: list[int]  # of their slots
    found: Found

    def names(self, at: slice) -> list[BlockName]:
        space, hashes, width = self.prefix.space, self.prefix.hashes, self.prefix.space.width
        return [
            BlockName(space.fingerprint, space.group, hashes[block * width : (block + 1) * width])
            for block in self.blocks[at]
        ]


@dataclass(eq=False, slots=True)
class _Ours:
    """The daemon's own attachment to a namespace, in whose name it reserves."""

    attachment: Attachment
    writer: Writer


class Remote:
    """The questions and the fetches of a node. Use as an async context manager; leaving it ends all of them."""

    def __init__(
        self,
        settings: ClusterSettings,
        cache: Cache,
        transfer: Transfer,
        sources: Sequence[Source],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._transfer = transfer
        self._sources = sources
        self._clock = clock
        # The loop's thread alone changes all of this.
        self._questions: dict[Asked, Question] = {}
        self._forgot_at = -math.inf
        self._ours: dict[bytes, _Ours] = {}
        self._prefills: dict[tuple[str, bytes], Prefill] = {}
        self._fetches: set[asyncio.Task[list[str | None]]] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._paused = False
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pause()

    async def pause(self) -> None:
        """Ends all questions and fetches, and begins no others, until `resume`."""
        self._paused = True
        for question in self._questions.values():
            question.task.cancel()
        if self._questions:
            await asyncio.wait([question.task for question in self._questions.values()])
        self._questions.clear()
        for fetch in self._fetches:
            fetch.cancel()
        if self._fetches:
            await asyncio.wait(self._fetches)
        await asyncio.sleep(0)  # for what they report
        for forgetting in self._forgetting:
            forgetting.cancel()
        if self._forgetting:
            await asyncio.wait(self._forgetting)

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False

    # ---- questions

    def ask(
        self, attachment: Attachment, space: Space, hashes: bytes, first: int, *, ticket: bytes = b""
    ) -> Question | None:
        """The question for the blocks of a chain from `first` on, begun if nobody has asked lately; None: no use.

        `ticket`: what another node's engine handed over with the request; that node is then asked, whoever else is.
        """
        if self._paused or self._settings.fetch == "never" or space.namespace.hash_algo not in CRYPTOGRAPHIC:
            return None
        end = min(len(hashes), (first + MOST_BLOCKS) * space.width)
        hashes = hashes[:end]
        # Engines of another speed decide for themselves, and a ticket names a node that others do not know of.
        key = (space.number, hashes[-space.width :], attachment.engine, ticket)
        question = self._questions.get(key)
        if question is not None and (question.asking or self._clock() < question.expires):
            return question
        if len(self._questions) >= QUESTIONS:
            self._forget_answered()
            if len(self._questions) >= QUESTIONS:
                self.counters["questions_refused"] += 1
                return None
        prefill = self.prefill(attachment)
        task = asyncio.create_task(self._answer(key, space, hashes, first, prefill, ticket), name="question")
        question = self._questions[key] = Question(space, first, task)
        self.counters["questions"] += 1
        return question

    def prefill(self, attachment: Attachment) -> Prefill:
        """What is known of the speed at which an engine computes what it does not find."""
        key = (attachment.engine, attachment.spaces[0].fingerprint)
        known = self._prefills.get(key)
        if known is None:
            if len(self._prefills) >= PREFILLS:
                self._prefills.pop(next(iter(self._prefills)))
            known = self._prefills[key] = Prefill()
        return known

    def _forget_answered(self) -> None:
        now = self._clock()
        if now < self._forgot_at + ERROR_S:
            return  # not for each of those who ask while there is no room: it takes the loop half a millisecond
        self._forgot_at = now
        self._questions = {key: one for key, one in self._questions.items() if one.asking or now < one.expires}

    async def _answer(
        self, key: Asked, space: Space, hashes: bytes, first: int, prefill: Prefill, ticket: bytes
    ) -> None:
        question, began = self._questions[key], self._clock()
        keep = ERROR_S
        each, missing = space.shape.block_tokens, len(hashes) // space.width - first
        # What is handed over may still be stored there: that takes as long as computing, and is waited for.
        patience = math.inf if ticket else self._patience(prefill, first * each, 0, missing * each)
        try:
            decision, founds = await self._weigh(
                space, hashes, first, prefill, ticket, min(patience, self._settings.deadline)
            )
            question.decision = decision
            keep = ABSENT_S
            if decision.ranges:
                begun = self._clock() if ticket else began
                self._begin(space, hashes, first, begun, decision, founds, prefill)
        except CascadeError as error:
            question.error = str(error)
        except Exception as error:
            log.exception("question failed")
            question.error = str(error)
        finally:
            if question.error:
                self.counters["questions_failed"] += 1
            question.expires = self._clock() + keep

    async def _weigh(
        self, space: Space, hashes: bytes, first: int, prefill: Prefill, ticket: bytes, timeout: float
    ) -> tuple[Decision, list[Found]]:
        """Asks every source; what the cost model makes of the answers that come within `timeout` seconds.

        CascadeError when there is none that says anything.
        """
        tail = hashes[first * space.width :]
        # Less than all of the time: a source that does not answer must not keep the others' answers from being used.
        limit = max(timeout * ANSWER_SHARE, min(ANSWER_S, timeout * ANSWER_MOST))
        asked = [source.find(space, tail, ticket, limit) for source in self._sources]
        told, errors = await answers(asked, timeout)
        founds = [found for one in told for found in one]
        if not founds and errors:
            raise errors[0]
        decision = decide(
            [Offer(found.name, found.blocks, found.link) for found in founds],
            block_bytes=space.block_bytes,
            block_tokens=space.shape.block_tokens,
            position=first * space.shape.block_tokens,
            prefill=prefill,
            policy=self._settings.fetch,
            deadline=self._settings.deadline,
        )
        return decision, founds

    async def explain(self, space: Space, hashes: bytes, first: int) -> dict[str, Any]:
        """Asks as a lookup would, fetches nothing, and says what would be fetched from where and why.

        Judged by the speed of that engine of this namespace that was the last to be met.
        """
        known = [one for (_, fingerprint), one in self._prefills.items() if fingerprint == space.fingerprint]
        prefill = known[-1] if known else Prefill()
        try:
            decision, founds = await self._weigh(space, hashes, first, prefill, b"", self._settings.deadline)
        except CascadeError as error:
            return {"first": first, "error": str(error), "sources": []}
        ranges = {one.offer: one for one in decision.ranges}
        sources = []
        for number, found in enumerate(founds):
            part = ranges.get(number, Range(number, 0, 0))
            one = {"name": found.name, "blocks": found.blocks, "fetch": part.end - part.start, "from": part.start}
            sources.append(one | found.link.shown())
        return {"first": first, "why": decision.why, "sources": sources, "prefill": prefill.shown()}

    def status(self) -> dict[str, Any]:
        return {
            "asking": sum(question.asking for question in self._questions.values()),
            "fetching": len(self._fetches),
            "prefill": [
                {"engine": engine, "namespace": fingerprint.hex(), **one.shown()}
                for (engine, fingerprint), one in list(self._prefills.items())[-MOST_LISTED:]
                if one.observed
            ],
            "counters": dict(self.counters),
        }

    # ---- fetches

    def _patience(self, prefill: Prefill, position: int, tokens: int, whole: int) -> float:
        return math.inf if self._settings.fetch == "always" else patience(prefill, position, tokens, whole)

    def _begin(
        self,
        space: Space,
        hashes: bytes,
        first: int,
        begun: float,
        decision: Decision,
        founds: Sequence[Found],
        prefill: Prefill,
    ) -> None:
        """Reserves the blocks of a chain from `first` on, as far as there is room, and begins to receive them.

        `begun`: since when the engine waits.
        """
        width = space.shape.block_tokens

        def patient(block: int) -> float:
            return self._patience(prefill, first * width, (block - first) * width, decision.blocks * width)

        end = first + decision.blocks
        prefix = _Prefix(space, hashes, first, end, begun, self._clock() + self._settings.deadline, patient)
        for part in decision.ranges:
            if not self._begin_range(prefix, first + part.start, first + part.end, founds[part.offer]):
                break

    def _begin_range(self, prefix: _Prefix, start: int, end: int, found: Found) -> bool:
        """Whether all of it could be reserved, or is here or on its way already: what follows has its parents."""
        space = prefix.space
        ours = self._attach(space)
        chain = prefix.hashes[: end * space.width]
        reserved = self._cache.reserve(ours.attachment, space.group, chain, start, source=found.tier)
        whole = not (reserved.states == BlockState.NO_ROOM).any()
        slots = np.flatnonzero(reserved.states == BlockState.SLOT)
        if not len(slots):
            return whole
        reservation = ours.attachment.reservations[reserved.lease]
        reservation.deadline = prefix.deadline + 1.0
        blocks, pages = (slots + start).tolist(), reserved.slots.pages.tolist()
        fetching = _Fetching(prefix, ours.attachment, ours.writer, reserved.lease, blocks, pages, found)
        room = asyncio.Semaphore(BATCHES)
        for at in _batches(found.link, space.block_bytes, len(blocks)):
            task = asyncio.create_task(self._receive(fetching, at, room), name="fetch")
            self._fetches.add(task)
            prefix.batches.append((blocks[at.start], task))
            task.add_done_callback(self._fetches.discard)
            # Not by the task itself: one that is cancelled before it begins would report nothing.
            task.add_done_callback(partial(self._received, fetching, at))
            self._transfer.follow(reservation.rows[at], task)
        found.link.queued += len(blocks) * space.block_bytes
        return whole

    def _jobs(self, fetching: _Fetching, at: slice) -> list[Fetch]:
        """Made for one batch when its turn comes: for 16,384 blocks at once they hold the loop for 40 ms."""
        space, view = fetching.prefix.space, self._cache.residency.dram.view
        named = zip(fetching.names(at), fetching.pages[at], strict=True)
        return [Fetch(name, view(page, space.block_bytes).data) for name, page in named]

    def _attach(self, space: Space) -> _Ours:
        ours = self._ours.get(space.fingerprint)
        if ours is None:
            attachment = self._cache.attach(space.namespace, 1, "kvcascade")
            attachment.sessions = 1  # as long as the daemon lives
            ours = self._ours[space.fingerprint] = _Ours(attachment, self._cache.join(attachment, 0))
        return ours

    async def _receive(self, fetching: _Fetching, at: slice, room: asyncio.Semaphore) -> list[str | None]:
        """Receives one batch. Its memory is written by nobody any more when this ends, however it ends."""
        prefix, link = fetching.prefix, fetching.found.link
        block, count = fetching.blocks[at.start], at.stop - at.start
        async with room:
            began = self._clock()
            if prefix.end <= block or began >= prefix.deadline:
                return ["not begun"] * count
            limit = prefix.begun + prefix.patience(block) - began
            reasons: list[str | None] = [GIVEN_UP] * count
            under_way = min(link.queued, BATCHES * count * prefix.space.block_bytes)
            with contextlib.suppress(TimeoutError):
                # Not the fetch's own time: that would tell of a source that does not answer.
                async with asyncio.timeout(None if math.isinf(limit) else limit):
                    reasons = await fetching.found.fetch(self._jobs(fetching, at), prefix.deadline - began)
            spent = self._clock() - began
            if reasons[0] == GIVEN_UP or (None not in reasons and began + spent >= prefix.deadline):
                link.late(under_way, spent)
            return reasons

    def _received(self, fetching: _Fetching, at: slice, task: "asyncio.Task[list[str | None]]") -> None:
        """Commits the leading blocks of a batch that are good, and gives up the rest of the prefix."""
        blocks = np.array(fetching.blocks[at], dtype=np.uint32)
        fetching.found.link.queued -= len(blocks) * fetching.prefix.space.block_bytes
        reasons: list[str | None] = ["cancelled"] * len(blocks)
        if not task.cancelled():
            error = task.exception()
            if error is None:
                reasons = task.result()
            else:
                log.error("fetch failed source=%s", fetching.found.name, exc_info=error)
                reasons = ["failed"] * len(blocks)
        good = next((number for number, reason in enumerate(reasons) if reason is not None), len(blocks))
        cache, attachment, lease = self._cache, fetching.attachment, fetching.lease
        if good:
            cache.commit(attachment, fetching.writer, lease, blocks[:good])
        if good < len(blocks):
            self._cut(fetching, int(blocks[good]), reasons[good] or "")
            self._disproved(fetching, at, reasons)
            # The scheduler's voice first: all behind is given up. Then the writer's: these slots are written no more.
            cache.abort(attachment, None, lease, blocks[good:])
            cache.abort(attachment, fetching.writer, lease, blocks[good:])

    def _cut(self, fetching: _Fetching, block: int, reason: str) -> None:
        """A prefix ends before `block`: what is on its way behind it is of no use any more."""
        prefix = fetching.prefix
        prefix.end = min(prefix.end, block)
        if not prefix.cut:
            prefix.cut = True
            log.warning("prefix cut source=%s reason=%s", fetching.found.name, reason)
            self.counters["prefixes_cut"] += 1
            self.counters["prefixes_given_up"] += reason == GIVEN_UP
        for start, task in prefix.batches:
            if start >= prefix.end:
                task.cancel()

    def _disproved(self, fetching: _Fetching, at: slice, reasons: Iterable[str | None]) -> None:
        """Counts what proved untrue, and begins to take away what nobody could use."""
        told = list(zip(fetching.names(at), reasons, strict=True))
        self.counters["fetched_untrue_blocks"] += sum(reason is not None and disproves(reason) for _, reason in told)
        false = [name for name, reason in told if reason is not None and contradicts(reason)]
        forget = fetching.found.forget
        if forget is None or not false or self._paused or len(self._forgetting) >= FORGETTING:
            return
        task = asyncio.create_task(self._forget(forget, false), name="forget")
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(
        self, forget: Callable[[Sequence[BlockName]], Awaitable[None]], names: Sequence[BlockName]
    ) -> None:
        try:
            await forget(names)
            self.counters["forgotten_blocks"] += len(names)
        except CascadeError as error:
            log.warning("false values are left where they are reason=%s", error)
        except Exception:
            log.exception("false values were not taken away")


async def answers(
    asked: Iterable[Coroutine[Any, Any, T]], timeout: float | None = None
) -> tuple[list[T], list[CascadeError]]:
    """What those say that answer within `timeout` seconds, and why others cannot tell.

    None of them goes on when this ends, or is cancelled.
    """
    told: list[T] = []
    errors: list[CascadeError] = []
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
    finally:
        for task in tasks:
            task.cancel()
        await outlast(tasks)
    for task in tasks:
        error = TierUnavailable("no answer in time") if task.cancelled() else task.exception()
        if error is None:
            told.append(task.result())
        elif isinstance(error, CascadeError):
            errors.append(error)
        else:
            log.error("a source failed", exc_info=error)
            errors.append(TierUnavailable(str(error) or type(error).__name__))
    return told, errors


def _batches(link: Link, block_bytes: int, count: int) -> Iterator[slice]:
    """Cuts `count` blocks: into what a link brings in a moment; at first into few, where its speed is not known.

    Never into less than what says something of the speed.
    """
    least = -(-SMALL // block_bytes)
    limit = max(least, BATCH_BYTES // block_bytes)
    if link.observed:
        size = limit = max(least, min(limit, int(link.now().bandwidth * BATCH_S) // block_bytes))
    else:
        size, limit = least, max(least, limit // NEW_LINK)
    start = 0
    while start < count:
        end = min(count, start + size)
        yield slice(start, end)
        start, size = end, min(2 * size, limit)
