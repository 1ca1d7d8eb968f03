"""Which copies run on one rank, and what its engine is still to be told: what every worker side keeps.

Rule: a result is told once, and never of a request that the engine has dropped. What failed of a load in the background
is told with the end of the whole load: an engine that hears of the one without the other takes the load for good.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from .base import FailedLoad, Report, Transfer


@dataclass(eq=False, slots=True)
class Copy:
    """One running copy; made by `TransferBook.begin`, ended by `TransferBook.end`, once."""

    transfer: Transfer
    load: bool
    given_up: bool = False


@dataclass(slots=True)
class _Entry:
    """What one request's engine waits for. `loads` and `saves`: running copies that count.

    `failed`: of its loads in the background, until these are told to have ended.
    """

    loads: set[Copy] = field(default_factory=set)
    saves: set[Copy] = field(default_factory=set)
    failed: list[FailedLoad] = field(default_factory=list)
    awaits_received: bool = False
    awaits_sent: bool = False

    @property
    def idle(self) -> bool:
        return not (self.loads or self.saves or self.awaits_received or self.awaits_sent)


class TransferBook:
    """Which copies run on one rank, and what its engine is still to be told: each result once, while it waits.

    A worker side begins each copy on the engine's thread, ends it on whatever thread copies, and returns `take()`
    from `finished()`. Every method may be called from any thread; only `preempt` and `close` wait.

    A copy may be given up while it runs (`preempt`, `drop`, `close`): `end` then says so, and its result must be
    thrown away: a save is aborted, not committed; a load is told to nobody. A request that comes back under the
    same id after it was dropped or preempted starts afresh: copies of its earlier life cannot be mistaken for the new.
    """

    def __init__(self) -> None:
        # All of it guarded by _changed.
        self._changed = threading.Condition()
        self._requests: dict[str, _Entry] = {}
        self._failed: list[FailedLoad] = []  # loads within the step
        self._running: set[Copy] = set()
        self._closed = False

    def begin(self, transfer: Transfer, *, load: bool) -> Copy:
        """Note a copy before it touches memory. After `close` it is given up from the start."""
        copy = Copy(transfer, load)
        with self._changed:
            if self._closed:
                copy.given_up = True
                return copy
            entry = self._requests.setdefault(transfer.request_id, _Entry())
            (entry.loads if load else entry.saves).add(copy)
            entry.awaits_received |= load and transfer.background
            self._running.add(copy)
        return copy

    def end(self, copy: Copy, failed_blocks: Iterable[int] = (), *, doubted: bool = False) -> bool:
        """The copy touches memory no more. `failed_blocks`: the engine's ids of blocks that were not loaded.

        `doubted` as in `FailedLoad`.

        False: it was given up meanwhile, so whatever it did must not count. Ending a copy twice is a bug
        (ValueError).
        """
        transfer = copy.transfer
        with self._changed:
            if copy not in self._running:
                if self._closed:
                    return False
                raise ValueError(f"the copy for request {transfer.request_id!r} had ended before")
            self._running.discard(copy)
            self._changed.notify_all()
            if copy.given_up:
                return False
            entry = self._requests[transfer.request_id]
            (entry.loads if copy.load else entry.saves).discard(copy)
            blocks = tuple(failed_blocks)
            if copy.load and blocks:
                failure = FailedLoad(transfer.request_id, transfer.group, blocks, transfer.background, doubted)
                (entry.failed if transfer.background else self._failed).append(failure)
            self._forget_idle(transfer.request_id)
            return True

    def fail(self, load: FailedLoad) -> None:
        """A load that was promised to the engine and never began (`StepPlan.failed`)."""
        with self._changed:
            if not load.background:
                self._failed.append(load)
                return
            entry = self._requests.setdefault(load.request_id, _Entry())
            entry.awaits_received = True
            entry.failed.append(load)

    def keep(self, request_id: str) -> None:
        """The engine keeps the finished request's blocks until it is reported as sent, which is now due."""
        with self._changed:
            self._requests.setdefault(request_id, _Entry()).awaits_sent = True

    def drop(self, request_id: str) -> None:
        """The engine has forgotten the request: nothing of it is reported any more, its running copies are given up."""
        with self._changed:
            self._give_up(request_id)

    def preempt(self, request_ids: Iterable[str], timeout: float) -> frozenset[str]:
        """Wait up to `timeout` seconds for these requests' copies to end by themselves, then give up the others.

        Nothing that ended is undone: a save that has ended may still be committed, for its bytes were read in time.
        Returns the requests of which a given-up copy still runs: their blocks are not to be reused until `wait_ended`.
        """
        wanted = frozenset(request_ids)
        with self._changed:
            self._wait(wanted, timeout)
            for request_id in wanted:
                self._give_up(request_id)
            return self._busy(wanted)

    def wait_ended(self, request_ids: Iterable[str], timeout: float) -> bool:
        """Whether, within `timeout` seconds, no copy of these requests runs any more, given up or not."""
        wanted = frozenset(request_ids)
        with self._changed:
            return self._wait(wanted, timeout)

    def busy(self, request_id: str) -> bool:
        """Whether a copy from or into the request's blocks still runs."""
        with self._changed:
            return bool(self._busy(frozenset((request_id,))))

    def take(self) -> Report:
        """What is to be told to the engine now, each thing once."""
        with self._changed:
            sent, received = set(), set()
            failed, self._failed = self._failed, []
            running = {copy.transfer.request_id for copy in self._running}
            for request_id, entry in list(self._requests.items()):
                if entry.awaits_received and not entry.loads:
                    entry.awaits_received = False
                    received.add(request_id)
                    failed += entry.failed
                    entry.failed = []
                # Blocks are free for reuse when no copy touches them, not even one that was given up.
                if entry.awaits_sent and request_id not in running:
                    entry.awaits_sent = False
                    sent.add(request_id)
                self._forget_idle(request_id)
            return Report(frozenset(sent), frozenset(received), tuple(failed))

    def close(self, timeout: float) -> bool:
        """Give up every copy; whether all have ended within `timeout` seconds. Later ones are given up at once."""
        with self._changed:
            self._closed = True
            for request_id in list(self._requests):
                self._give_up(request_id)
            self._failed.clear()
            return self._changed.wait_for(lambda: not self._running, timeout)

    def _give_up(self, request_id: str) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            for copy in entry.loads | entry.saves:
                copy.given_up = True
        self._failed = [load for load in self._failed if load.request_id != request_id]

    def _forget_idle(self, request_id: str) -> None:
        if self._requests[request_id].idle:
            del self._requests[request_id]

    def _busy(self, request_ids: frozenset[str]) -> frozenset[str]:
        return frozenset(copy.transfer.request_id for copy in self._running) & request_ids

    def _wait(self, request_ids: frozenset[str], timeout: float) -> bool:
        return self._changed.wait_for(lambda: not self._busy(request_ids), timeout)
