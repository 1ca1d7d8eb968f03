"""When a drive is left alone: what failed, what hangs, what is not there, and for how long nothing is tried."""

from collections.abc import Callable
from typing import Final

_BACKOFF_FIRST: Final = 1.0
_BACKOFF_MOST: Final = 60.0
# A healthy device answers within milliseconds, a busy network file system within seconds.
_STALLED_SECONDS: Final = 10.0


class Direction:
    """Whether writes, or reads, are left alone: a failure starts a pause, the next doubles it, a success ends it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0
        self.reason: str | None = None
        self.recoveries = 0

    def failed(self, reason: str) -> None:
        now = self._clock()
        # Calls that were under way together fail together; they count as one failure.
        if self.reason is None or now >= self._until:
            self._pause = min(_BACKOFF_MOST, 2 * self._pause) if self._pause else _BACKOFF_FIRST
            self._until = now + self._pause
        self.reason = reason

    def worked(self) -> None:
        self.recoveries += self.reason is not None
        self.reason, self._pause, self._until = None, 0.0, 0.0

    @property
    def due(self) -> bool:
        """Sick, and its pause is over."""
        return self.reason is not None and self._clock() >= self._until

    def refusal(self) -> str | None:
        return f"sick: {self.reason}" if self.reason is not None and self._clock() < self._until else None


class Health:
    """A drive's health; the loop's thread alone."""

    def __init__(self, clock: Callable[[], float], longest: Callable[[], float]) -> None:
        """`longest`: seconds that the oldest call under way has been running."""
        self._longest = longest
        self.writes = Direction(clock)
        self.reads = Direction(clock)
        self.away: str | None = None
        """Why the directory is not to be used, until it has been opened anew."""

    @property
    def reason(self) -> str | None:
        """Why the drive is sick."""
        return self.away or self.stalled or self.writes.reason or self.reads.reason

    @property
    def stalled(self) -> str | None:
        """Why it cannot be waited for: a call has not ended for long."""
        longest = self._longest()
        return f"no answer from the device for {longest:.0f} s" if longest >= _STALLED_SECONDS else None

    def refuses_writes(self) -> str | None:
        """Why no write is tried now."""
        return self._refuses() or self.writes.refusal()

    def refuses_reads(self) -> str | None:
        """Why no read is tried now."""
        return self._refuses() or self.reads.refusal()

    def _refuses(self) -> str | None:
        whole = self.away or self.stalled
        return f"sick: {whole}" if whole else None
