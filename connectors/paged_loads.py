"""The loads that a paged engine's scheduler has promised: from the blocks that the engine gave for one to its end.

Rules: what is promised is planned, or is told to have failed: an engine waits for it. Blocks that are below memory are
brought up first, on threads that may wait, and such a load is planned by a later step; one whose blocks are in memory
never stands behind those that wait.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.attachment import Load, Session
from kvcascade.tiers.block import KVGroup

from .base import BlockIds, FailedLoad, Report, Request, Transfer
from .paged_asking import Asker, Errand
from .paged_lookups import Found

log = logging.getLogger(__name__)

LOCATE_THREADS = 2
LOAD_THREADS = 8


@dataclass(eq=False, slots=True)
class _Loading(Errand):
    """One load: blocks [first, first + len(blocks)) of each group's chain, their places in memory once it is done.

    `leased`: the first block of each group's lease; between it and `first`, or the other way, nothing is needed.
    `until`: how long it may wait for blocks to come up, those of all groups and its place in the queue included.
    """

    request_id: str
    background: bool
    session: Session
    leases: tuple[int, ...]
    leased: tuple[int, ...]
    first: tuple[int, ...]
    blocks: BlockIds
    until: float
    places: list[Load] = field(default_factory=list)
    planned: bool = False

    def place(self, group: int) -> Load | None:
        """Where the leased blocks of the group are, as many of them as came up."""
        return self.places[group] if group < len(self.places) and not self.abandoned else None


class Loads:
    """All loads that have not ended; the scheduling thread's, as `Asker` is."""

    def __init__(self, groups: Sequence[KVGroup], asker: Asker, *, null_block: int | None) -> None:
        """`null_block` as with `PagedScheduler`."""
        self._groups = groups
        self._asker = asker
        self._limits = asker.limits
        self._null_block = null_block
        self._locator = asker.threads("locate", LOCATE_THREADS)
        self._waiter = asker.threads("load", LOAD_THREADS)
        # The scheduling thread's alone.
        self._unplanned: list[_Loading] = []
        self._background: dict[str, _Loading] = {}  # planned or not, by request
        self._step_loads: dict[int, _Loading] = {}  # planned, within a step, by lease
        self._cancelled: list[_Loading] = []  # of requests that ended before their load was planned
        self.seen_failures = 0
        """Loads within a step that have failed, as far as told."""

    def under_way(self, request_id: str) -> bool:
        """Whether one in the background has not ended."""
        return request_id in self._background

    def begin(
        self, request: Request, found: Found | None, blocks: BlockIds, computed: int, tokens: int, *, background: bool
    ) -> None:
        """Load `tokens` behind the first `computed` into the request's `blocks`; the leases are released at its end.

        Of nothing found the load fails at once.
        """
        first = tuple(computed // group.block_tokens for group in self._groups)
        ends = [(computed + tokens) // group.block_tokens for group in self._groups]
        loading = _Loading(
            request.request_id,
            background,
            found.session if found is not None else self._asker.session,
            found.leases if found is not None else (0,) * len(first),
            found.leased if found is not None else first,
            first,
            tuple(tuple(ids[begin:end]) for ids, begin, end in zip(blocks, first, ends, strict=True)),
            self._asker.clock() + (self._limits.handoff_patience if request.ticket else self._limits.load_wait),
        )
        self._unplanned.append(loading)
        if background:
            self._background[request.request_id] = loading
        if found is None:
            self._asker.abandon(loading)
        elif found.places is not None and found.places.count >= ends[0]:
            loading.places = [found.places]
            self._asker.settle(loading)
        else:
            counts = [end - at for end, at in zip(ends, found.leased, strict=True)]
            self._locator.submit(self._locate, loading, counts)

    def plan(self) -> tuple[list[Transfer], list[FailedLoad]]:
        """What this step loads, and what of it cannot be loaded."""
        loads: list[Transfer] = []
        failed: list[FailedLoad] = []
        for loading in self._unplanned:
            self._asker.wait_for(loading)
        due = [loading for loading in self._unplanned if not loading.pending]
        self._unplanned = [loading for loading in self._unplanned if loading.pending]
        for loading in due:
            loading.planned = True
            if not loading.background and loading.leases[0]:
                self._step_loads[loading.leases[0]] = loading
            for group, ids in enumerate(loading.blocks):
                place = loading.place(group)
                begin = loading.leased[group] - loading.first[group]
                here = range(begin, begin + place.count) if place is not None else range(0)
                wanted = [i for i, block in enumerate(ids) if block != self._null_block]
                if place is not None and (found := [i for i in wanted if i in here]):
                    loads.append(_load_of(loading, group, place, found))
                if late := tuple(ids[i] for i in wanted if i not in here):
                    self._asker.count("blocks_late", len(late))
                    failed.append(FailedLoad(loading.request_id, group, late, loading.background))
        for loading in self._cancelled:
            # Its lease goes when the load is reported as ended, or by its deadline.
            loading.planned = True
            failed.append(FailedLoad(loading.request_id, 0, loading.blocks[0], True))
        self._cancelled = []
        return loads, failed

    def finished(self, request_id: str) -> bool:
        """The request has ended. Whether a load in the background goes on, for whose end the engine waits."""
        loading = self._background.get(request_id)
        if loading is not None and not loading.planned:
            # The next plan tells the workers that it has failed; its blocks, not copied by anybody, are still good.
            self._asker.abandon(loading)
            self._unplanned.remove(loading)
            self._cancelled.append(loading)
        return loading is not None

    def completed(self, report: Report) -> dict[str, dict[int, int]]:
        """Release what has ended, and have what failed doubted.

        Requests of which a load failed, and for each group of theirs the first block of the chain that did.
        """
        lost: dict[str, dict[int, int]] = {}
        doubted: dict[int, tuple[_Loading, dict[int, list[int]]]] = {}
        for failure in report.failed:
            self.seen_failures += not failure.background
            loading = self._background.get(failure.request_id) if failure.background else self._step_load(failure)
            if loading is None:
                continue
            first, ids = loading.first[failure.group], loading.blocks[failure.group]
            indices = [first + place for place, block in enumerate(ids) if block in failure.blocks]
            self._asker.count("load_failures", len(indices))
            firsts = lost.setdefault(failure.request_id, {})
            if indices:
                firsts[failure.group] = min(firsts.get(failure.group, indices[0]), indices[0])
            if failure.doubted:
                doubted.setdefault(id(loading), (loading, {}))[1].setdefault(failure.group, []).extend(indices)
        ended = [self._background.pop(request_id) for request_id in report.received if request_id in self._background]
        ended += [self._step_loads.pop(lease) for lease in report.loaded if lease in self._step_loads]
        for loading in ended:
            _, failures = doubted.pop(id(loading), (loading, {}))
            self._asker.submit(self._end, loading, failures)
        for loading, failures in doubted.values():
            self._asker.submit(self._doubt, loading, failures)
        return lost

    def reset(self) -> bool:
        """What no plan holds yet fails. Whether no load is under way in the background, so that none brings old KV."""
        for loading in self._unplanned:
            self._asker.abandon(loading)
        return not self._background

    def _step_load(self, failure: FailedLoad) -> _Loading | None:
        return next((load for load in self._step_loads.values() if load.request_id == failure.request_id), None)

    # ---- on other threads

    def _locate(self, loading: _Loading, counts: Sequence[int]) -> None:
        """On a thread that waits for no block; where one has to come up from below, another goes on."""
        if self._find(loading, counts, waits=False) or loading.abandoned or self._asker.closed:
            self._asker.settle(loading)
        else:
            self._waiter.submit(self._wait, loading, counts)

    def _wait(self, loading: _Loading, counts: Sequence[int]) -> None:
        """On a thread that may wait."""
        if not loading.abandoned:
            self._find(loading, counts, waits=True)
        self._asker.settle(loading)

    def _find(self, loading: _Loading, counts: Sequence[int], *, waits: bool) -> bool:
        """Ask where the blocks are; False if some are not in memory, and may be later."""
        loading.places = []
        timeout = self._limits.timeout
        try:
            for lease, count in zip(loading.leases, counts, strict=True):
                left = loading.until - self._asker.clock()
                if left < -timeout:
                    return True  # the daemon has answered nobody for long
                wait = max(0.0, left) if waits else 0.0
                place = loading.session.load(lease, count, wait_ms=int(wait * 1000), timeout=wait + timeout)
                loading.places.append(place)
                if place.count < count and not waits:
                    return False
        except CascadeError as error:
            self._asker.failed("load failed", loading.request_id, error)
        except Exception:
            log.exception("load failed request=%s", loading.request_id)
        return True

    def _end(self, loading: _Loading, failures: dict[int, list[int]]) -> None:
        """On the asking thread."""
        self._doubt(loading, failures)
        self._asker.release(loading.session, loading.leases)

    def _doubt(self, loading: _Loading, failures: dict[int, list[int]]) -> None:
        """On the asking thread: what was copied and is not whole becomes a miss, with all that follows it.

        Blocks that were not copied are not doubted by that; that the engine does not wait for them again is what
        `Lookups.give_up` is for.
        """
        for group, indices in failures.items():
            held = [index - loading.leased[group] for index in indices]
            try:
                loading.session.failed(loading.leases[group], held, timeout=self._limits.timeout)
            except CascadeError as error:
                self._asker.failed("a failed load could not be reported", loading.request_id, error)


def _load_of(loading: _Loading, group: int, place: Load, wanted: Sequence[int]) -> Transfer:
    """A load of those of the group's blocks, by their places among `loading.blocks`."""
    first, ids = loading.first[group], loading.blocks[group]
    at = np.asarray(wanted, np.int64) + first - loading.leased[group]
    return Transfer(
        loading.request_id,
        group,
        loading.leases[group],
        tuple(first + i for i in wanted),
        tuple(ids[i] for i in wanted),
        tuple(place.pools[at].tolist()),
        tuple(place.pages[at].tolist()),
        tuple(place.generations[at].tolist()),
        loading.background,
        place.boot,
    )
