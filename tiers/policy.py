"""Eviction order: who goes first.

A policy is a score over blocks; the lowest goes first. Whether a block may go at all (ready, unpinned, idle, childless)
is the caller's question, not the policy's. `VictimQueue` makes any score that only ever grows when a block is used, and
that no two blocks share, cheap to serve: it sorts the lowest scores once and hands them out until they run dry. An
entry whose score has changed since is skipped, so for LRU stamps the order is exact, and a refill over n blocks (about
15 ms at 10^6) is paid once in n/16 evictions.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint32]
Scores = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

LEAST_REFILL = 4096
REFILL_SHARE = 16


class VictimQueue:
    """Hands out rows in the order of their scores.

    `candidates()` gives all rows that could be victims some day, `score(rows)` their scores now, `usable(rows)` which
    of some rows, in order of score, may be victims at this moment if all of them go.
    """

    def __init__(
        self, candidates: Callable[[], Rows], score: Callable[[Rows], Scores], usable: Callable[[Rows], Mask]
    ) -> None:
        self._candidates = candidates
        self._score = score
        self._usable = usable
        # Ascending by score; entries before `_next` are used up.
        self._rows: Rows = np.empty(0, dtype=np.uint32)
        self._scores: Scores = np.empty(0, dtype=np.uint64)
        self._next = 0

    def take(self, count: int) -> Rows:
        """Up to `count` usable rows, lowest scores first, each once.

        They leave the queue, whatever the caller does with them.
        """
        taken: Rows = np.empty(0, dtype=np.uint32)
        least, all_asked = 2 * count, False
        while len(taken) < count:
            if self._next == len(self._rows):
                if all_asked:
                    break
                all_asked = self._refill(least)
                self._leave_out(taken)
                least *= REFILL_SHARE  # where most of the lowest are not usable, look at many more
                continue
            left = count - len(taken)
            end = min(self._next + max(2 * left, 64), len(self._rows))
            rows = self._rows[self._next : end]
            same = np.flatnonzero(self._score(rows) == self._scores[self._next : end])
            # Asked together with what was taken: a parent may go when its children do.
            good = same[self._usable(np.concatenate([taken, rows[same]]))[len(taken) :]]
            # Cutting a set of victims short keeps it sound: children stand before their parents.
            picked = good[:left]
            self._next = end if len(good) <= left else self._next + int(picked[-1]) + 1
            taken = np.concatenate([taken, rows[picked]])
        return taken

    def lowest(self) -> int:
        """A score that no candidate is below; infinitely high (2^64) when there is none."""
        for _ in range(2):
            fresh = self._score(self._rows[self._next :]) == self._scores[self._next :]
            if fresh.any():
                self._next += int(fresh.argmax())
                return int(self._scores[self._next])
            self._refill()
        return 1 << 64

    def add(self, rows: Rows) -> None:
        """Puts distinct rows in that became candidates since the last refill."""
        if self._next == len(self._rows):
            return  # the next take refills, and finds them
        left_rows, left_scores = self._rows[self._next :], self._scores[self._next :]
        scores = self._score(rows)
        # Beyond the last entry lies what no refill has looked at yet, with lower scores among it maybe.
        rows, scores = rows[scores <= left_scores[-1]], scores[scores <= left_scores[-1]]
        order = np.argsort(scores)
        rows, scores = rows[order], scores[order]
        at = np.searchsorted(left_scores, scores)
        fresh = (left_scores[at] != scores) | (left_rows[at] != rows)
        if fresh.any():
            self._rows = np.insert(left_rows, at[fresh], rows[fresh])
            self._scores, self._next = np.insert(left_scores, at[fresh], scores[fresh]), 0

    def _leave_out(self, rows: Rows) -> None:
        left = self._rows[self._next :]
        stay = ~np.isin(left, rows)
        self._rows, self._scores, self._next = left[stay], self._scores[self._next :][stay], 0

    def _refill(self, least: int = 0) -> bool:
        """Whether these are all candidates there are."""
        rows = self._candidates()
        scores = self._score(rows)
        keep = max(LEAST_REFILL, len(rows) // REFILL_SHARE, least)
        cut = len(rows) > keep
        if cut:
            lowest = np.argpartition(scores, keep)[:keep]
            rows, scores = rows[lowest], scores[lowest]
        order = np.argsort(scores)
        self._rows, self._scores, self._next = rows[order], scores[order], 0
        return not cut
