"""An engine's own pages between its host memory and the daemon's slots, and questions about them, on threads of ours.

For engines whose scheduler's thread may not wait, and whose pages are stored as they are: a page is a row of one array,
a block is a page. Everything that is put in comes out: a question as a last `Answer`, a job as a `Done`, once; what
the daemon does not answer, or refuses, as not found or failed. One thread asks, one stores, some load; loads for which
blocks must come up from below wait on threads of their own, so that what is in memory never stands behind them.

Blocks that other nodes hold are waited for here, by asking again: a block is found when it lies in the node's own
memory or on its disk, not when somebody is said to have it.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvcascade.config.errors import CascadeError, DaemonUnavailable
from kvcascade.daemon.attachment import Load, Reservation, Session
from kvcascade.daemon.protocol import BlockState, Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

NOTHING: Final = np.empty(0, np.uint32)
HASH: Final = 32  # bytes of a hash: only SHA-256 keys are taken
GROUP: Final = 4  # bytes of the KV group behind it

# One operation of the daemon takes microseconds; this is when it counts as away.
OPERATION_S: Final = 1.0
# A bit more than one operation and one copy, for threads that are to end.
END_S: Final = 15.0
BATCH_BYTES: Final = 32 << 20
LOADERS: Final = 2
WAITERS: Final = 8
# Blocks that other nodes are asked for are asked after this often: less and less while they do not come.
AGAIN_FIRST_S, AGAIN_LAST_S, AGAIN_FACTOR = 0.001, 0.064, 1.5
LOOKUP_BATCHES: Final = 64  # queued; beyond it the lookup thread is far behind and new questions are misses
CIRCUIT_FIRST_S, CIRCUIT_LAST_S = 0.5, 5.0
# After holes, or an absence of the daemon, engines should offer all their blocks anew for so long, not only new ones.
HEAL_S: Final = 60.0

COUNTERS: Final = {
    "lookup_timeouts": "Chunk lookups answered as a miss because the daemon's answer was late.",
    "unavailable": "Operations that found no daemon within their deadline.",
    "loaded_chunks": "Chunks copied from the daemon's memory into the engine's.",
    "failed_chunks": "Chunks that were promised and could not be loaded.",
    "stored_chunks": "Chunks copied into the daemon's memory.",
    "known_chunks": "Chunks offered that the daemon had, or another engine was storing.",
    "dropped_chunks": "Chunks offered that found no room, no parent or no daemon.",
}


@dataclass(frozen=True, slots=True)
class Question:
    """What one request wants to know of one group: of a chain (`chain`), or of the blocks `hashes` one by one.

    `remote`: other nodes may be asked. Blocks of a chain that are fetched one by one would not be part of it any more.
    """

    number: int
    request_id: str
    group: int  # vLLM's
    hashes: bytes
    chain: bool
    remote: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """`found`: places among the question's hashes; of a chain, all before the number of them.

    Not `last`: other nodes are being asked for the rest, or it is on its way; nothing is known of it yet.
    """

    question: Question
    found: "NDArray[np.uint32]"
    last: bool = True


@dataclass(eq=False, slots=True)
class _Asked:
    """A question until its last answer, on the lookup thread: `places` of its hashes are still asked after."""

    question: Question
    until: float
    places: "NDArray[np.uint32]"
    remote: bool  # whether other nodes are still to be asked, or being asked
    found: "NDArray[np.uint32]" = field(default_factory=lambda: NOTHING)
    told: bool = False
    pause: float = AGAIN_FIRST_S
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [start, start + len(chunks)) of a chain, whose hashes `hashes` are, and the rows that hold them."""

    group: int  # the namespace's
    hashes: bytes
    start: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks to store (`runs`) or to load (`chunks`) under these keys, each a hash and a KV group."""

    job_id: int
    keys: tuple[bytes, ...]
    runs: tuple[Run, ...] = ()  # of a store: the keys in their order
    chunks: tuple[int, ...] = ()  # of a load: one a key


@dataclass(frozen=True, slots=True)
class Done:
    """A job that has ended: the keys that are whole where they were to go, and what it took."""

    job_id: int
    success: bool
    good: tuple[bytes, ...] = ()
    seconds: float = 0.0
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class _Work:
    """A job that threads work at, and which of its keys are where they were to go."""

    job: Job
    good: list[bool]
    began: float = 0.0


class Circuit:
    """Open (nobody asks) for a while after a failure, longer after each further one. Any thread may use it."""

    def __init__(self) -> None:
        self._until = 0.0
        self._pause = CIRCUIT_FIRST_S

    @property
    def open(self) -> bool:
        return time.monotonic() < self._until

    def failed(self) -> None:
        self._until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, CIRCUIT_LAST_S)

    def worked(self) -> None:
        self._until, self._pause = 0.0, CIRCUIT_FIRST_S


class Mover:
    """Asks the daemon and copies, on threads of its own; everything put in comes out, answered or failed.

    `load_s` bounds a load, `remote_s` how long a question waits for what other nodes hold.
    """

    def __init__(
        self, session: Session, rows: "NDArray[np.uint8]", groups: dict[int, int], load_s: float, remote_s: float
    ) -> None:
        self.session = session
        self.circuit = Circuit()
        # Read and emptied by the scheduler's thread. Counts may miss an update: they are for people.
        self.counts: Counter[str] = Counter()
        self.answers: deque[Answer] = deque()
        self.results: deque[Done] = deque()
        self.heal_until = 0.0
        self._rows: NDArray[np.uint8] | None = rows
        self._groups = groups
        self._load_s = load_s
        self._remote_s = remote_s
        self._boot = b""
        self._owing = False  # something could not be stored for want of a daemon
        self._questions: queue.Queue[list[Question] | None] = queue.Queue(LOOKUP_BATCHES)
        # Under _changed: the jobs that no thread has begun, the number of those begun, and whether it is over.
        self._changed = threading.Condition()
        self._loads: deque[_Work] = deque()
        self._late: deque[_Work] = deque()  # loads that wait for blocks from below
        self._stores: deque[_Work] = deque()
        self._running = 0
        self._over = False
        work = [
            ("lookup", self._look_up),
            ("store", lambda: self._work(self._stores, self._store)),
            *[("load", lambda: self._work(self._loads, self._load))] * LOADERS,
            *[("wait", lambda: self._work(self._late, self._load_late))] * WAITERS,
        ]
        self._threads = [threading.Thread(target=run, name=f"kvcascade-{name}", daemon=True) for name, run in work]
        for thread in self._threads:
            thread.start()

    # ---- the scheduler's thread: none of these waits, but for drain and close

    def ask(self, questions: list[Question]) -> bool:
        """False when the lookup thread is too far behind."""
        try:
            self._questions.put_nowait(questions)
        except queue.Full:
            return False
        return True

    def load(self, job: Job) -> None:
        self._queue(self._loads, job)

    def store(self, job: Job) -> None:
        self._queue(self._stores, job)

    def _queue(self, queued: deque[_Work], job: Job) -> None:
        with self._changed:
            queued.append(_Work(job, [False] * len(job.keys)))
            if self._over:
                self._give_up()
            self._changed.notify_all()

    def drain(self) -> None:
        """Give up what is not begun, and return when nothing runs: vLLM's memory is left alone then.

        Bounded by the deadline of the operation, and the copy, that each thread is in.
        """
        with self._changed:
            self._give_up()
            while self._running:
                self._changed.wait()
                self._give_up()  # what has been put off since

    def close(self) -> None:
        """As drain, and the threads end. Raises CascadeError if one does not: it may still copy."""
        with self._changed:
            self._over = True
            self._give_up()
            self._changed.notify_all()
        try:
            self._questions.put(None, timeout=END_S)
        except queue.Full:
            pass
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise CascadeError(f"shutdown: {', '.join(stuck)} did not end within {END_S:g} s")
        self._rows = None
        self.session.close(OPERATION_S)

    def _give_up(self) -> None:
        for queued in (self._loads, self._late, self._stores):
            while queued:
                self.results.append(Done(queued.popleft().job.job_id, False))

    # ---- the lookup thread

    def _look_up(self) -> None:
        open_: list[_Asked] = []
        while True:
            wait = max(0.0, min(asked.again for asked in open_) - time.monotonic()) if open_ else None
            try:
                batch = self._questions.get(timeout=wait)
            except queue.Empty:
                batch = []
            if batch is None:
                return
            now = time.monotonic()
            for question in batch:
                places = np.arange(len(question.hashes) // HASH, dtype=np.uint32)
                open_.append(_Asked(question, now + self._remote_s, places, question.remote))
            open_ = [asked for asked in open_ if asked.again > now or not self._advance(asked)]

    def _advance(self, asked: _Asked) -> bool:
        """Asks once, and tells what is new; whether that was the last time."""
        question, known, last = asked.question, len(asked.found), True
        try:
            if not self.circuit.open and not self._over:
                last = self._find(asked)
                self._worked()
        except CascadeError as error:
            self._failed(error)
        except Exception:
            log.exception("lookup failed request=%s", question.request_id)
        now = time.monotonic()
        last = last or now >= asked.until
        if last or len(asked.found) > known or not asked.told:
            asked.told = True
            self.answers.append(Answer(question, asked.found, last))
        asked.again = now + asked.pause
        asked.pause = min(asked.pause * AGAIN_FACTOR, AGAIN_LAST_S)
        return last

    def _find(self, asked: _Asked) -> bool:
        """Takes over what the daemon says is here; whether it expects no more."""
        question, places = asked.question, asked.places
        hashes = question.hashes
        if len(places) * HASH < len(hashes):
            hashes = b"".join(hashes[place * HASH : (place + 1) * HASH] for place in places.tolist())
        looked = self.session.lookup(
            hashes,
            request="",
            group=self._groups[question.group],
            pin=False,
            promote=False,
            remote=asked.remote,
            each=not question.chain,
        )
        matched = places[: looked.matched] if looked.found is None else places[looked.found]
        coming = (looked.tiers == Tier.REDIS) | (looked.tiers == Tier.PEER)
        if question.chain:
            asked.found = matched[: int(coming.argmax())] if coming.any() else matched
        else:
            asked.found = matched[~coming]
        asked.remote = asked.remote and looked.asking
        if not asked.remote:
            # What nobody has is not asked after again: each time it would count as missed.
            asked.places = matched
        return not asked.remote and not coming.any()

    def _failed(self, error: CascadeError) -> None:
        if isinstance(error, DaemonUnavailable):
            self.counts["unavailable"] += 1
            self.circuit.failed()
        else:
            log.warning("the daemon would not: %s", error)

    def _worked(self) -> None:
        self.circuit.worked()
        try:
            boot = self.session.info.boot
        except DaemonUnavailable:
            return
        if self._owing or boot != self._boot:
            if self._owing or self._boot:
                self.heal_until = time.monotonic() + HEAL_S
            self._owing, self._boot = False, boot

    # ---- the copying threads

    def _work(self, queued: deque[_Work], run: Callable[[_Work], bool]) -> None:
        """Runs what is queued; what is not over then is for those that may wait."""
        while True:
            with self._changed:
                while not queued and not self._over:
                    self._changed.wait()
                if not queued:
                    return
                work = queued.popleft()
                self._running += 1
            work.began = work.began or time.monotonic()
            over = True
            try:
                over = run(work)
            except Exception:
                log.exception("job failed job=%s", work.job.job_id)
            with self._changed:
                if over or self._over:
                    self.results.append(self._done(work))
                else:
                    self._late.append(work)
                self._running -= 1
                self._changed.notify_all()

    def _done(self, work: _Work) -> Done:
        whole = tuple(key for key, well in zip(work.job.keys, work.good, strict=True) if well)
        size = 0 if self._rows is None else int(self._rows.shape[1])
        return Done(work.job.job_id, all(work.good), whole, time.monotonic() - work.began, len(whole) * size)

    def _batch(self) -> int:
        assert self._rows is not None
        return max(1, BATCH_BYTES // int(self._rows.shape[1]))

    def _load(self, work: _Work) -> bool:
        """Loads what is in memory; whether that is all that can be had."""
        over = self._advance_load(work, waits=False)
        if over:
            self._count_loaded(work)
        return over

    def _load_late(self, work: _Work) -> bool:
        """Loads what is in memory, or comes there in time."""
        self._advance_load(work, waits=True)
        self._count_loaded(work)
        return True

    def _count_loaded(self, work: _Work) -> None:
        self.counts["loaded_chunks"] += sum(work.good)
        self.counts["failed_chunks"] += len(work.good) - sum(work.good)

    def _advance_load(self, work: _Work, *, waits: bool) -> bool:
        """False if blocks are left out that lie below memory."""
        job, good, over = work.job, work.good, True
        by_group: dict[int, list[int]] = {}
        for place, key in enumerate(job.keys):
            if not good[place]:
                by_group.setdefault(self._groups[group_of(key)], []).append(place)
        for group, places in by_group.items():
            for start in range(0, len(places), self._batch()):
                part = places[start : start + self._batch()]
                # Room for promotions, and pins, may come with each block that was loaded and let go.
                while part and not self.circuit.open:
                    left = max(0.0, work.began + self._load_s - time.monotonic())
                    loaded, below = self._load_part(job, group, part, left if waits else 0.0)
                    for place in loaded:
                        good[place] = True
                    part = [place for place in part if not good[place]]
                    if not loaded or not left:
                        over = over and not below
                        break
        return over

    def _load_part(self, job: Job, group: int, part: list[int], wait: float) -> tuple[list[int], bool]:
        """Loads what lies in memory, or comes there in time; which of `part`, and whether more of it lies below."""
        session, loaded, below, lease = self.session, list[int](), False, 0
        try:
            hashes = b"".join(job.keys[place][:HASH] for place in part)
            looked = session.lookup(hashes, request="", group=group, each=True, remote=False)
            lease = looked.lease
            if not lease or looked.found is None:
                return [], False
            load = session.load(lease, looked.matched, wait_ms=int(wait * 1000), timeout=wait + OPERATION_S)
            below = load.count < looked.matched
            loaded = self._copy_out(load, job, [part[index] for index in looked.found[: load.count].tolist()])
            self._worked()
        except CascadeError as error:
            self._failed(error)
        finally:
            if lease:
                with suppress(CascadeError):
                    session.release(lease, timeout=OPERATION_S)
        return loaded, below

    def _copy_out(self, load: Load, job: Job, places: list[int]) -> list[int]:
        rows = self._rows
        assert rows is not None
        with self.session.copying(load) as pools:
            for place, pool, page in zip(places, load.pools.tolist(), load.pages.tolist(), strict=True):
                np.copyto(rows[job.chunks[place]], pools[pool].slot(page, rows.shape[1]))
        intact = self.session.intact(load)
        return [place for place, well in zip(places, intact.tolist(), strict=True) if well]

    def _store(self, work: _Work) -> bool:
        good: list[bool] = []
        for run in work.job.runs:
            for first in range(0, len(run.chunks), self._batch()):
                chunks = run.chunks[first : first + self._batch()]
                start = run.start + first
                good += self._store_part(run.group, run.hashes[: (start + len(chunks)) * HASH], start, chunks)
        work.good = good
        self.counts["dropped_chunks"] += len(good) - sum(good)
        return True

    def _store_part(self, group: int, hashes: bytes, start: int, chunks: Sequence[int]) -> list[bool]:
        nothing = [False] * len(chunks)
        if self.circuit.open:
            self._owing = True
            return nothing
        session = self.session
        try:
            reserved = session.reserve(hashes, request="", group=group, start=start)
            if reserved.hole is not None:
                self.heal_until = time.monotonic() + HEAL_S
            if len(reserved.blocks):
                self._copy_in(reserved, chunks)
                if session.commit(reserved.lease, reserved.blocks).gone:
                    return nothing
            self._worked()
        except CascadeError as error:
            self._owing = True
            self._failed(error)
            return nothing
        known = (reserved.states == BlockState.HERE) | (reserved.states == BlockState.IN_FLIGHT)
        self.counts["stored_chunks"] += len(reserved.blocks)
        self.counts["known_chunks"] += int(known.sum())
        result: list[bool] = (known | (reserved.states == BlockState.SLOT)).tolist()
        return result

    def _copy_in(self, reserved: Reservation, chunks: Sequence[int]) -> None:
        rows = self._rows
        assert rows is not None
        try:
            with self.session.copying(reserved) as pools:
                for block, pool, page in zip(
                    reserved.blocks.tolist(), reserved.pools.tolist(), reserved.pages.tolist(), strict=True
                ):
                    np.copyto(pools[pool].slot(page, rows.shape[1]), rows[chunks[block - reserved.start]])
        except BaseException:
            self.session.abort(reserved.lease, timeout=OPERATION_S)
            raise


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP:], "big")
