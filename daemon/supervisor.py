"""systemd's side of the daemon's life: readiness, the watchdog, and descriptors that outlive the process.

Datagrams to $NOTIFY_SOCKET as sd_notify(3) describes; descriptors come back by LISTEN_FDS and LISTEN_FDNAMES. Whatever
goes wrong there is logged and changes nothing else: a daemon serves without a supervisor, too.
"""

import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import Final

log = logging.getLogger("kvcascade.supervisor")

FIRST_DESCRIPTOR: Final = 3  # SD_LISTEN_FDS_START


class Supervisor:
    """What the environment says of a supervisor. Its variables are removed, so that no child takes them for its own."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._path = environ.pop("NOTIFY_SOCKET", "")
        store = environ.pop("FDSTORE", "")
        # Before systemd 254 it does not say; what is offered to a supervisor that keeps nothing is closed by it.
        self.keeps_descriptors = bool(self._path) and (int(store) > 0 if store.isdigit() else True)
        watchdog, of = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        #: Seconds within which `notify("WATCHDOG=1")` is expected again; None where it is not.
        self.watchdog_s = int(watchdog) / 1e6 if watchdog.isdigit() and of == str(os.getpid()) else None
        #: The descriptors that were kept, by name; whoever takes one out owns it.
        self.kept: dict[str, int] = {}
        count, names = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_FDNAMES", "").split(":")
        if environ.pop("LISTEN_PID", "") == str(os.getpid()) and count.isdigit():
            for number in range(int(count)):
                os.set_inheritable(FIRST_DESCRIPTOR + number, False)
                name = names[number] if number < len(names) else "unknown"
                if name in self.kept:
                    os.close(FIRST_DESCRIPTOR + number)
                else:
                    self.kept[name] = FIRST_DESCRIPTOR + number

    def notify(self, *lines: str, descriptors: Sequence[int] = ()) -> None:
        """Tells the supervisor, if there is one. Never blocks and never raises."""
        if not self._path:
            return
        path = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(path)
                socket.send_fds(sock, ["\n".join(lines).encode()], list(descriptors))
        except OSError as error:
            log.warning("the supervisor cannot be told %s reason=%s", lines[0], error.strerror)

    def keep(self, name: str, descriptor: int) -> None:
        """Has a descriptor kept beyond this process's end, in place of what was kept under the name."""
        self.notify("FDSTOREREMOVE=1", f"FDNAME={name}")
        # Without FDPOLL=0 a descriptor that reports an error is thrown out.
        self.notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=[descriptor])

    def forget(self, name: str) -> None:
        """Has it kept no more, and closes what is left of it here."""
        self.notify("FDSTOREREMOVE=1", f"FDNAME={name}")
        if name in self.kept:
            os.close(self.kept.pop(name))
