"""The client for asyncio: the contract of ``client.Client`` on an event loop, without file descriptors.

Rule: as there, a call ends within its deadline with its own reply or an error; a cancelled call leaves nothing behind
but a reply that is dropped when it comes. Apart from client.py, because importing asyncio alone costs a command line
50 ms.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any, cast

from kvcascade.config.errors import DaemonUnavailable, ProtocolError

from .client import DEFAULT_TIMEOUT_S, EventCallback, decode_reply, resolve_socket_path
from .protocol import Frame, FrameDecoder, Kind, decode_body, distrust, encode_request, take

log = logging.getLogger(__name__)


class AsyncClient(asyncio.Protocol):
    """One connection to the daemon, used from the loop that connected it. It never reconnects by itself."""

    def __init__(
        self, socket_path: str | os.PathLike[str] | None = None, *, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.path = resolve_socket_path(socket_path)
        self.timeout = timeout
        self._callback: EventCallback | None = None
        self._correlations = itertools.count(1)
        # All of this changes on the loop's thread alone.
        self._transport: asyncio.Transport | None = None
        self._pid = os.getpid()
        self._failure = "not connected"
        self._decoder = FrameDecoder()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._closed: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None and self._pid == os.getpid()

    def on_event(self, callback: EventCallback) -> None:
        """Have ``callback(event, body)`` called on the loop for each event; what it raises is logged."""
        self._callback = callback

    async def connect(self, timeout: float | None = None) -> None:
        """Connect if not connected. Raises DaemonUnavailable, within ``timeout`` seconds."""
        if self.connected:
            return
        if reason := distrust(self.path):
            raise DaemonUnavailable(f"no daemon at {self.path}: {reason}")
        loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._decoder = FrameDecoder()
        try:
            async with asyncio.timeout(self.timeout if timeout is None else timeout):
                await loop.create_unix_connection(lambda: self, os.fspath(self.path))
        except TimeoutError as error:
            raise DaemonUnavailable(f"no daemon at {self.path}: it does not accept connections") from error
        except OSError as error:
            raise DaemonUnavailable(f"no daemon at {self.path}: {error.strerror or error}") from error

    async def call(
        self, op: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Send a request and return its reply's body; errors as those of ``Client.call``.

        Cancellation ends the wait at once; the daemon may still carry the request out.
        """
        if self._pid != os.getpid():
            raise DaemonUnavailable("this process was forked; the connection is its parent's")
        if self._transport is None:
            raise DaemonUnavailable(f"{self._failure} ({self.path})")
        if timeout is None:
            timeout = self.timeout
        correlation = next(self._correlations)
        frame = encode_request(correlation, op, body)
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = reply
        try:
            self._transport.write(frame)
            async with asyncio.timeout(timeout):
                answer = await reply
        except TimeoutError as error:
            raise DaemonUnavailable(f"no answer to {op!r} within {timeout:g} s ({self.path})") from error
        finally:
            self._waiting.pop(correlation, None)
        return decode_reply(answer)

    async def aclose(self) -> None:
        """Close the connection; calls under way end with DaemonUnavailable. Idempotent."""
        closed = self._closed
        if self._transport is not None:
            self._lose("closed")
        if closed is not None:
            await closed

    async def __aenter__(self) -> "AsyncClient":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ----------------------------------------------------------------------------- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if frame.kind == Kind.EVENT:
                    self._deliver(frame)
                elif frame.kind == Kind.REQUEST:
                    raise ProtocolError("a request from the daemon")
                else:
                    reply = self._waiting.pop(frame.correlation, None)
                    # Cancelled in this very turn of the loop, or late: nobody wants it.
                    if reply is not None and not reply.done():
                        reply.set_result(frame)
        except ProtocolError as error:
            self._lose(f"the daemon broke the protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(f"the daemon is gone: {error}" if error else "the daemon closed the connection")
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    def _lose(self, reason: str) -> None:
        if self._transport is None:
            return
        # Aborted: what the daemon does not read would keep a closing transport, and aclose(), waiting.
        self._transport.abort()
        self._transport = None
        self._failure = reason
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(DaemonUnavailable(f"{reason} ({self.path})"))
        self._waiting.clear()

    def _deliver(self, frame: Frame) -> None:
        body = decode_body(frame.body)
        event = take(body, "event", str)
        if self._callback is None:
            return
        try:
            self._callback(event, body)
        except Exception:
            log.exception("event callback failed event=%s", event)
