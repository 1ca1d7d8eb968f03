"""A real daemon whose leases for other nodes, or for what comes from them, run out while bytes are still on their way.

python hasty_daemon.py SECONDS serve FLAG VALUE ...
"""

import sys
from pathlib import Path
from typing import Any

from kvcascade.daemon import cli, granting, peer_server, server
from kvcascade.daemon.cache import Cache


def command(seconds: float) -> list[str | Path]:
    """The command line, in the place of `kvcascade serve`."""
    return [sys.executable, "-P", __file__, str(seconds), "serve"]


class HastyCache(Cache):
    """Ends reservations of what is fetched after `seconds`, whatever their deadline."""

    seconds = 0.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._begun: dict[int, float] = {}

    def reserve(self, *arguments: Any, **named: Any) -> Any:
        reserved = super().reserve(*arguments, **named)
        if named.get("source") is not None:
            self._begun[reserved.lease] = self._clock()
        return reserved

    def expire(self) -> None:
        for attachment in self.attachments.values():
            for number, reservation in attachment.reservations.items():
                if number in self._begun:
                    reservation.deadline = min(reservation.deadline, self._begun[number] + self.seconds)
        super().expire()


if __name__ == "__main__":
    # What the kernel has taken is sent already, as far as the lease goes.
    peer_server.SOCKET_BYTES = 1 << 16
    granting.GRANT_S = HastyCache.seconds = float(sys.argv.pop(1))
    server.Cache = HastyCache  # type: ignore[misc]
    sys.exit(cli.main())
