"""What a paged engine's scheduler asks before a request is computed: how much of its prompt could be loaded instead.

A question is asked when the request arrives, so that its answer is there when it is scheduled, and again by the same
lease where the lease runs out or more tokens have hashes. What it finds stays leased until it is taken for a load, or
let go.

Rule: no request waits longer for an answer than computing it would be worth: `Limits` says how long that is.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.attachment import Load, Lookup, Session
from kvcascade.tiers.namespace import Namespace

from .base import NO_MATCH, Match, MatchState, Request, common_hit, loadable_tokens, new_tokens
from .paged_asking import Asker, Errand

log = logging.getLogger(__name__)

LATER = Match(0, MatchState.LATER)
WAIT_THREADS = 32
"""So many requests can be told at once what other nodes have; others are told when one of them has been."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup leased; whoever takes it gives the leases back.

    `leases`: a group's, 0 for none, on blocks from `leased` of its chain on. `places`: of those of a single group that
    were in memory at once, if they were.
    """

    session: Session
    leases: tuple[int, ...]
    leased: tuple[int, ...]
    places: Load | None


@dataclass(eq=False, slots=True)
class _Question(Errand):
    """One lookup.

    A list entry a group: `matched` leading blocks are there, and the lease of `answers` is on those from `first` on.
    `name`: what the daemon keeps the leases by; of two questions under one name the later answer has them all.
    """

    name: str
    usable: int
    asked_at: float
    session: Session
    answers: list[Lookup] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    tiers: tuple[int, ...] = ()
    until: float = 0.0  # while other nodes are asked: when the daemon answers at the latest, whatever they say
    places: Load | None = None
    error: str = ""


@dataclass(eq=False, slots=True)
class _Asked:
    """What is known of one request's questions."""

    question: _Question | None = None
    waiting_since: float | None = None
    given_up: bool = False
    tiers: tuple[int, ...] = ()  # of the blocks last offered for loading, of the group by which hits are told apart


class Lookups:
    """The questions of all requests; the scheduling thread's, as `Asker` is."""

    def __init__(
        self, namespace: Namespace, asker: Asker, *, ranks: int, windows: Sequence[int], volatile_groups: frozenset[int]
    ) -> None:
        """`windows` and `volatile_groups` as with `PagedScheduler`, a window for each group."""
        self._groups = namespace.groups
        self._block_bytes = namespace.block_bytes(0)
        self._asker = asker
        self._limits = asker.limits
        self._windows = tuple(windows)
        self._volatile = volatile_groups
        self._told = next((group for group, window in enumerate(self._windows) if not window), 0)
        # Loads within a step are for one rank and one group: what a rank computes on another's bad block is bad too,
        # and engines take failures of several groups by request, which is for loads in the background alone.
        self._syncs = ranks == 1 and self._windows == (0,) and self._limits.sync_bytes > 0
        self._unit = int(np.lcm.reduce([group.block_tokens for group in self._groups]))
        self._waiter = asker.threads("wait", WAIT_THREADS)
        # The scheduling thread's alone.
        self._asked: dict[str, _Asked] = {}
        self._names = 0  # given so far
        self._sync_left = self._limits.sync_bytes

    def arrived(self, request: Request) -> None:
        """Ask for a new request."""
        asked = self._asked[request.request_id] = _Asked()
        usable = self._usable(request)
        if request.reads and usable and self._asker.may_ask:
            self._ask(asked, request, usable)

    def match(self, request: Request, computed: int) -> tuple[Match, Sequence[int]]:
        """What can be loaded behind the first `computed` tokens (`SchedulerConnector.match`).

        With it, how many leading blocks of each group's chain the daemon has; empty where that is not known.
        """
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = _Asked()
        usable = self._usable(request)
        if not request.reads or asked.given_up or usable <= computed:
            self._let_go(asked)
            return NO_MATCH, ()
        question = self._current(asked, request, usable)
        if question is None:
            asked.waiting_since = None
            return NO_MATCH, ()
        if not question.until:
            self._asker.wait_for(question)
        now = self._asker.clock()
        since = asked.waiting_since = now if asked.waiting_since is None else asked.waiting_since
        if not question.done:
            if now - max(since, question.asked_at, question.until) < self._limits.patience:
                return LATER, ()
            if not question.until:
                self._asker.leave_alone()
            return self._miss(asked, request, "unanswered"), ()
        if question.error:
            return self._miss(asked, request, "unavailable"), ()
        self._asker.answered()
        return self._judge(asked, question, request, computed), question.matched

    def take(self, request_id: str) -> Found | None:
        """What the last match leased, the caller's from now on."""
        asked = self._asked.get(request_id)
        question = asked.question if asked is not None else None
        if asked is None or question is None:
            return None
        asked.question = None
        leases = tuple(answer.lease for answer in question.answers)
        return Found(question.session, leases, tuple(question.first), question.places)

    def sources(self, request_id: str, tokens: int) -> dict[int, int]:
        """By the tier that they were in when they were looked up, the last `tokens` of those that were matched."""
        asked = self._asked.get(request_id)
        size = self._groups[self._told].block_tokens
        found: Counter[int] = Counter()
        for tier in asked.tiers[: tokens // size] if asked is not None else ():
            found[tier] += size
        return dict(found)

    def let_go(self, request_id: str) -> None:
        """Give back what is leased for it; it may be asked for again."""
        if (asked := self._asked.get(request_id)) is not None:
            self._let_go(asked)

    def give_up(self, request_id: str) -> None:
        """A load has failed: it is never asked for again, lest it waits for the same blocks again."""
        if (asked := self._asked.get(request_id)) is not None:
            asked.given_up = True

    def finished(self, request_id: str) -> None:
        self.let_go(request_id)
        self._asked.pop(request_id, None)

    def reset(self) -> None:
        """Nothing found so far is loaded."""
        for asked in self._asked.values():
            self._let_go(asked)

    def begin_step(self) -> None:
        """Another step, another budget for what the engine waits for within it."""
        self._sync_left = self._limits.sync_bytes

    # ---- the answer

    def _judge(self, asked: _Asked, question: _Question, request: Request, computed: int) -> Match:
        hit = self._hit(question)
        if not all(self._is_leased(question, group, hit) for group in range(len(self._groups))):
            hit = 0
        tokens = new_tokens(hit, computed, request.tokens, self._unit)
        if not tokens:
            return self._miss(asked, request, "missing" if not hit else "engine_has_it")
        asked.waiting_since = None
        asked.tiers = question.tiers[computed // self._groups[self._told].block_tokens :]
        nbytes = self._block_bytes * tokens // self._groups[0].block_tokens
        places = question.places
        sync = places is not None and places.count * self._unit >= computed + tokens and nbytes <= self._sync_left
        if sync:
            self._sync_left -= nbytes
        return Match(tokens, MatchState.READY, background=not sync)

    def _hit(self, question: _Question) -> int:
        """The tokens that all groups have."""
        sizes = [group.block_tokens for group in self._groups]
        return common_hit((matched * size, size) for matched, size in zip(question.matched, sizes, strict=True))

    def _needed(self, group: int, hit: int) -> tuple[int, int]:
        """The blocks [first, end) of a group that a hit of so many tokens needs."""
        size, window = self._groups[group].block_tokens, self._windows[group]
        return (max(0, hit - window) // size if window else 0), hit // size

    def _is_leased(self, question: _Question, group: int, hit: int) -> bool:
        first, end = self._needed(group, hit)
        answer, leased = question.answers[group], question.first[group]
        return first == end or (answer.lease > 0 and leased <= first and end <= leased + answer.matched)

    def _miss(self, asked: _Asked, request: Request, reason: str) -> Match:
        self._asker.count(f"miss_{reason}")
        if request.ticket and reason != "engine_has_it":
            self._asker.count("handoffs_missed")
        self._let_go(asked)
        return NO_MATCH

    # ---- the question

    def _usable(self, request: Request) -> int:
        """The leading tokens that may be loaded: whole blocks in every group that have hashes, all but the last."""
        hashed = min(
            (len(hashes) * group.block_tokens for hashes, group in zip(request.hashes, self._groups, strict=True)),
            default=0,
        )
        return loadable_tokens(hashed, request.tokens, self._unit)

    def _current(self, asked: _Asked, request: Request, usable: int) -> _Question | None:
        """The question that answers for `usable` tokens now, asked anew where the last one's lease is running out."""
        question = asked.question
        if question is not None and question.usable == usable:
            if not question.done or question.error:
                return question
            kept = min((answer.deadline_ms for answer in question.answers), default=0) / 2000
            if not kept or self._asker.clock() - question.asked_at < kept:
                return question
        if not self._asker.may_ask:
            self._let_go(asked)
            return None
        return self._ask(asked, request, usable)

    def _ask(self, asked: _Asked, request: Request, usable: int) -> _Question:
        old = asked.question
        if old is not None and old.done and not old.error and old.session is self._asker.session:
            name = old.name  # renews its leases
        else:
            # One that is still being answered, of an earlier request of this name too, gives its own leases back.
            self._names += 1
            name = f"{request.request_id}/{self._names}"
            if old is not None:
                self._abandon(old)
        question = asked.question = _Question(name, usable, self._asker.clock(), self._asker.session)
        self._asker.count("lookups")
        self._asker.submit(self._look_up, question, request)
        return question

    def _let_go(self, asked: _Asked) -> None:
        asked.waiting_since = None
        question, asked.question = asked.question, None
        if question is not None:
            self._abandon(question)

    def _abandon(self, question: _Question) -> None:
        if self._asker.abandon(question) and not question.error:
            leases = [answer.lease for answer in question.answers if answer.lease]
            if leases:
                self._asker.submit(self._asker.release, question.session, leases)

    # ---- on other threads

    def _look_up(self, question: _Question, request: Request) -> None:
        """On the asking thread; then, if other nodes are being asked, on one that waits for them."""
        session = question.session
        asking = False
        began = max(self._asker.clock(), question.until)
        try:
            for number, window in enumerate(self._windows):
                # Of a group with a window the whole chain is asked for, so that it counts as used, but not held.
                end = question.usable // self._groups[number].block_tokens
                answer = self._ask_for(question, request, number, 0, end, hold=not window)
                question.answers.append(answer)
                question.first.append(0)
                matched = answer.matched if answer.lease or window else 0
                # A drafter's KV of a block's last token depends on the token behind it, which the hash does not cover.
                question.matched.append(max(0, matched - (number in self._volatile)))
                asking |= answer.asking
            question.tiers = tuple(question.answers[self._told].tiers.tolist())
            self._hold_windows(question, request)
            first = question.answers[0]
            if self._syncs and first.lease and first.matched == first.ready > 0:
                nbytes = first.matched * self._block_bytes
                if nbytes <= self._limits.sync_bytes:
                    question.places = session.load(first.lease, first.matched, timeout=self._limits.timeout)
        except CascadeError as error:
            question.error = f"{type(error).__name__}: {error}"
            self._asker.failed("lookup failed", request.request_id, error)
            self._asker.blame(began)
        except Exception as error:
            question.error = f"{type(error).__name__}: {error}"
            log.exception("lookup failed request=%s", request.request_id)
        if asking and not question.until and not question.error and not question.abandoned and not self._asker.closed:
            patience = self._limits.handoff_patience if request.ticket else self._limits.remote_patience
            question.until = self._asker.clock() + patience
            self._waiter.submit(self._look_up_again, question, request)
            return
        if self._asker.settle(question) or question.error:
            self._asker.release(session, [answer.lease for answer in question.answers])

    def _look_up_again(self, question: _Question, request: Request) -> None:
        """On a thread that may wait: the lease is the same, and the daemon answers once other nodes have."""
        question.answers, question.matched, question.first = [], [], []
        self._look_up(question, request)

    def _ask_for(
        self, question: _Question, request: Request, group: int, first: int, end: int, *, hold: bool = True
    ) -> Lookup:
        """Blocks [first, end) of a chain. On the thread of `_look_up`, as the next one."""
        wait = max(0.0, question.until - self._asker.clock()) if question.until else 0.0
        return question.session.lookup(
            b"".join(request.hashes[group][first:end]),
            request=f"{question.name}/{group}"[-128:],
            group=group,
            pin=hold,
            promote=hold,
            each=first > 0,
            remote=not first,
            ticket=request.ticket,
            wait_ms=int(wait * 1000),
            timeout=wait + self._limits.timeout,
        )

    def _hold_windows(self, question: _Question, request: Request) -> None:
        hit = self._hit(question)
        for number, window in enumerate(self._windows):
            first, end = self._needed(number, hit)
            if not window or first == end:
                continue
            answer = self._ask_for(question, request, number, first, end)
            if first and answer.matched < end - first:
                # Blocks on their way from elsewhere are found in their chain only.
                first = 0
                answer = self._ask_for(question, request, number, first, end)
            question.answers[number], question.first[number] = answer, first
