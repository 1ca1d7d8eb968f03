"""A connected socket of which every call ends: by a deadline, and where payloads travel also once they stand still.

The connections to Redis and to other nodes are made of it. The deadline is that of the whole call. *Silence* is for how
long no byte may move: a link that is slow and alive is waited for as long as the deadline allows, one that is dead is
given up sooner. Bytes move when some arrive, when the kernel takes some to send, and when the other side acknowledges
what the kernel took before: on a slow link several MiB lie there, and neither call moves until they are gone.
"""

import fcntl
import math
import select
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

Bytes = bytes | memoryview

SOCKET_BYTES: Final = 4 << 20
IOV_MAX: Final = 512
TLS_BYTES: Final = 1 << 20  # that go to TLS in one call
LATE_S: Final = 0.05
LOOKS: Final = 4  # at what is still unsent, in the time of a silence
LATE: Final = "no answer in time"
SILENT: Final = "no byte moved for too long"


class Silence(TimeoutError):
    """No byte has moved for as long as may be, before the deadline came."""


def reason_of(error: OSError) -> str:
    """Why a call failed, for people."""
    if isinstance(error, TimeoutError):
        return SILENT if isinstance(error, Silence) else LATE
    return str(error.strerror or error)


class TimedSocket:
    """A stream socket for one thread, but for `cut`. Every call ends by its deadline; OSError for all that goes wrong.

    TimeoutError when the time is up, Silence when no byte moved; the socket is of no use then but to be closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._deadline = 0.0
        self._silence = math.inf
        self._timeout = -1.0  # the socket's
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def until(self, deadline: float, silence: float = math.inf) -> None:
        """Sets the time (`time.monotonic`) by which the next calls end, and for how long no byte may move in them."""
        self._deadline = deadline
        self._silence = silence

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def cut(self) -> None:
        """Ends it from another thread: who reads or sends finds it closed at once. OSError where it has ended."""
        # Not SSLSocket's own, which takes the TLS state away under the thread that uses it.
        socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def idle(self) -> bool:
        """Whether nothing has come that nobody asked for, an end included."""
        try:
            if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
                return False
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def connect(self, address: Any) -> None:
        """Connects the socket; TLS's handshake is still to come."""
        self._wait(time.monotonic(), self._silence)
        self._sock.connect(address)

    def secure(self) -> None:
        """TLS's handshake, where the socket is of TLS."""
        if isinstance(self._sock, ssl.SSLSocket):
            self._wait(time.monotonic(), self._silence)
            self._sock.do_handshake()

    def send(self, parts: Sequence[Bytes]) -> None:
        """Sends all parts, in order."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            if self._tls:
                sent = self._move(self._sock.send, views[0][:TLS_BYTES])
            else:
                sent = self._move(self._sock.sendmsg, views[:IOV_MAX])
            while sent:
                if sent >= len(views[0]):
                    sent -= len(views.pop(0))
                else:
                    views[0], sent = views[0][sent:], 0

    def receive(self, into: memoryview, more: memoryview | None = None) -> int:
        """Reads as many bytes as have come, at least one and at most as many as `into` has, and `more` behind it."""
        if more is None or self._tls:
            count = self._move(self._sock.recv_into, into)
        else:
            count = self._move(self._receive_in_turn, (into, more))
        if not count:
            raise ConnectionResetError("closed by the other side")
        return count

    def _receive_in_turn(self, buffers: tuple[memoryview, memoryview]) -> int:
        return self._sock.recvmsg_into(buffers)[0]

    def read_into(self, into: memoryview) -> None:
        """Reads exactly as many bytes as `into` has."""
        have = 0
        while have < len(into):
            have += self.receive(into[have:])

    def _move(self, call: Callable[[Any], int], argument: Any) -> int:
        """One call of the socket, repeated for as long as what was sent before is still moving."""
        now = moved = time.monotonic()
        unsent = math.inf
        while True:
            self._wait(now, min(self._silence / LOOKS, moved + self._silence - now))
            try:
                return call(argument)
            except TimeoutError:
                now = time.monotonic()
                if now >= self._deadline:
                    raise
                before, unsent = unsent, self._unsent()
                if unsent < before and (unsent or before < math.inf):
                    moved = now
                elif now - moved >= self._silence:
                    raise Silence from None

    def _unsent(self) -> int:
        """Bytes that the kernel has taken and the other side has not acknowledged."""
        (count,) = struct.unpack("i", fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
        return int(count)

    def _wait(self, now: float, silence: float) -> None:
        left = self._deadline - now
        if left <= 0:
            raise TimeoutError
        limit = min(left, max(silence, 0.001))
        # A system call, so not before each of those for small blocks; a call may end so much too late.
        if not limit <= self._timeout <= limit + LATE_S:
            self._sock.settimeout(limit)
            self._timeout = limit
