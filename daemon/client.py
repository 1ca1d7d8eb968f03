"""The synchronous client: one connection to the daemon, shared by the threads of a process.

Rule: a call ends within its deadline with its own reply or an error, whatever the daemon does; a reply is matched by
its correlation id alone, so that a late one can only be dropped.

Reading has no thread of its own, because a hop between threads costs more than the daemon's answer (16-18 us): the
calling thread that finds nobody reading reads for all (it *leads*), hands other threads their replies and, when it has
its own, passes the reading on to one of those that still wait. A watcher thread reads only while no call has been
active for IDLE_S, so that events are seen while the engine computes; it waits for input without taking any, and whoever
comes to call takes the reading away from it. Nobody ever blocks while holding the lock.
"""

import array
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from kvcascade.config.errors import DaemonUnavailable, ProtocolError

from .protocol import (
    MAX_DESCRIPTORS,
    Frame,
    FrameDecoder,
    Kind,
    decode_body,
    default_socket_path,
    distrust,
    encode_request,
    error_from,
    take,
)

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 5.0
IDLE_S: Final = 0.05
# Only what notices a connection that went away without waking poll(); input wakes it at once.
WATCH_S: Final = 1.0
RECEIVE_BYTES: Final = 65536

EventCallback = Callable[[str, dict[str, Any]], None]


def resolve_socket_path(socket_path: str | os.PathLike[str] | None = None) -> Path:
    """Return the socket to use: the argument, else KVCASCADE_SOCKET, else the default of this user."""
    return Path(socket_path or os.environ.get("KVCASCADE_SOCKET") or default_socket_path())


def decode_reply(frame: Frame) -> dict[str, Any]:
    """Return the body of a REPLY; raise the error of an ERROR, and ProtocolError for a body that cannot be decoded."""
    body = decode_body(frame.body)
    if frame.kind == Kind.ERROR:
        raise error_from(body)
    return body


class _Call:
    """A request under way. Written under the client's lock; `frame` and `error` are set once, by whoever reads."""

    __slots__ = ("correlation", "descriptors", "error", "frame", "parked", "wake")

    def __init__(self, correlation: int) -> None:
        self.correlation = correlation
        self.frame: Frame | None = None
        self.descriptors: list[int] = []
        self.error: str | None = None
        # `wake` is released exactly once for each time that `parked` is cleared by another thread.
        self.parked = False
        self.wake = threading.Lock()
        self.wake.acquire()

    @property
    def done(self) -> bool:
        return self.frame is not None or self.error is not None


class _Unsent:
    """The rest of a frame that the socket did not take at once; once begun it must go out whole."""

    __slots__ = ("begun", "correlation", "rest")

    def __init__(self, correlation: int, rest: memoryview, begun: bool) -> None:
        self.correlation = correlation
        self.rest = rest
        self.begun = begun


class Client:
    """One connection to the daemon; every method may be called from any thread.

    ``call`` needs ``connect`` first, and again after the connection was lost: a client never reconnects by itself
    (``attachment.Session`` does). In a forked child the client has lost its connection, the parent's goes on; the child
    may ``connect`` anew.
    """

    def __init__(
        self, socket_path: str | os.PathLike[str] | None = None, *, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.path = resolve_socket_path(socket_path)
        self.timeout = timeout
        self._correlations = itertools.count(1)
        self._callback: EventCallback | None = None
        self._reset("not connected")
        _clients.add(self)

    def _reset(self, failure: str) -> None:
        # All of this changes under _lock alone.
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._failure = failure
        self._calls: dict[int, _Call] = {}
        self._parked: dict[int, _Call] = {}
        # Who reads: a call that leads, the watcher, or nobody.
        self._reader: object | None = None
        self._poller = select.poll()
        # Threads that may be inside poll() on the socket: its number must not be closed, and so reused, under them.
        self._polling = 0
        self._doomed: list[socket.socket] = []
        self._unsent: deque[_Unsent] = deque()
        self._decoder = FrameDecoder()
        # Descriptors that came and whose frame is not whole yet; the calls whose replies may bring some, late ones too.
        self._descriptors: deque[int] = deque()
        self._wanting: set[int] = set()
        self._active_at = 0.0
        self._watcher: threading.Thread | None = None
        self._stopped = threading.Event()

    # ------------------------------------------------------------------------------------------------- connection

    @property
    def connected(self) -> bool:
        """Whether the connection was good when last used. A daemon's death shows here once somebody reads."""
        return self._socket is not None and self._pid == os.getpid()

    def on_event(self, callback: EventCallback) -> None:
        """Have ``callback(event, body)`` called for each event; to be set before ``connect``.

        It runs on whichever thread reads, perhaps in the middle of another thread's call: it must not block and not
        ``call``; it may ``post``. What it raises is logged.
        """
        self._callback = callback

    def connect(self, timeout: float | None = None) -> None:
        """Connect if not connected. Raises DaemonUnavailable, within ``timeout`` seconds."""
        if self._pid != os.getpid():
            self._forked()
        if self.connected:
            return
        if reason := distrust(self.path):
            raise DaemonUnavailable(f"no daemon at {self.path}: {reason}")
        # Non-blocking: a unix socket connects at once or, its backlog full, not at all.
        try:
            fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # this process has too many files open
            raise DaemonUnavailable(f"no socket to reach {self.path} by: {error.strerror or error}") from error
        try:
            deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
            while True:
                try:
                    fresh.connect(os.fspath(self.path))
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.005)
        except OSError as error:
            fresh.close()
            raise DaemonUnavailable(f"no daemon at {self.path}: {error.strerror or error}") from error
        except BaseException:
            fresh.close()
            raise
        with self._lock:
            if self._socket is not None:
                fresh.close()
                return
            self._socket = fresh
            self._decoder = FrameDecoder(max_descriptors=MAX_DESCRIPTORS)
            self._poller = select.poll()
            self._poller.register(fresh, select.POLLIN)
            self._active_at = time.monotonic()
            if self._callback is not None:
                self._stopped = threading.Event()
                self._watcher = threading.Thread(
                    target=self._watch, args=(fresh, self._stopped), name="kvcascade-watcher", daemon=True
                )
                self._watcher.start()

    def close(self) -> None:
        """Close the connection; calls under way end with DaemonUnavailable. Idempotent."""
        if self._pid != os.getpid():
            self._forked()
        with self._lock:
            self._fail("closed")
            watcher = self._watcher
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join()

    def __enter__(self) -> "Client":
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        """Let go of the parent's connection: closing our copy of it tells the daemon nothing, a shutdown would."""
        for number in self._descriptors:
            os.close(number)
        for each in [self._socket, *self._doomed]:
            if each is not None:
                each.close()
        self._reset("this process was forked; the connection is its parent's")

    def _fail(self, reason: str) -> None:
        if self._socket is None:
            return
        self._failure = reason
        try:
            # Wakes whoever is inside poll().
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._doomed.append(self._socket)
        self._socket = None
        self._stopped.set()
        if self._reader is self._watcher:
            self._reader = None
        for call in self._calls.values():
            call.error = reason
            self._unpark(call)
        self._calls.clear()
        self._unsent.clear()
        self._wanting.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._bury()

    def _bury(self) -> None:
        if not self._polling:
            while self._doomed:
                self._doomed.pop().close()

    def hung_up(self) -> bool:
        """Whether the daemon's end is closed now, asked of the kernel: `connected` hears of it only by reading."""
        with self._lock:
            if self._socket is None or self._pid != os.getpid():
                return True
            poller = select.poll()
            poller.register(self._socket, select.POLLRDHUP)
            return bool(poller.poll(0))

    # ------------------------------------------------------------------------------------------------------- calls

    def call(self, op: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Send a request and return its reply's body.

        Raises DaemonUnavailable when the connection is lost or ``timeout`` seconds (default: the client's) are over;
        the request may still be carried out. Raises what the daemon answered: Refused, ProtocolError, TierUnavailable.
        """
        return decode_reply(self._exchange(op, body, timeout, False)[0])

    def call_with_fds(
        self, op: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """As ``call``, for a reply that brings file descriptors: they are the caller's to close.

        On any error none is left open; those of a reply that comes too late are closed when it comes.
        """
        frame, descriptors = self._exchange(op, body, timeout, True)
        try:
            return decode_reply(frame), descriptors
        except BaseException:
            _close_all(descriptors)
            raise

    def post(self, op: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a request without waiting; its reply is dropped. Never blocks. Raises DaemonUnavailable."""
        if self._pid != os.getpid():
            self._forked()
        correlation = next(self._correlations)
        frame = encode_request(correlation, op, body)
        with self._lock:
            self._send(correlation, frame)

    def _exchange(
        self, op: str, body: Mapping[str, Any] | None, timeout: float | None, with_fds: bool
    ) -> tuple[Frame, list[int]]:
        if self._pid != os.getpid():
            self._forked()
        if timeout is None:
            timeout = self.timeout
        deadline = time.monotonic() + timeout
        correlation = next(self._correlations)
        frame = encode_request(correlation, op, body)
        call = _Call(correlation)
        try:
            with self._lock:
                self._calls[correlation] = call
                if with_fds:
                    self._wanting.add(correlation)
                self._send(correlation, frame)
                stuck = bool(self._unsent)
                leads = not stuck and self._lead_or_park(call)
            if stuck:
                self._push(call, deadline)
                with self._lock:
                    leads = self._lead_or_park(call)
            while True:
                if leads:
                    self._read_for(call, deadline)
                else:
                    call.wake.acquire(timeout=max(0.0, deadline - time.monotonic()))
                if call.frame is not None:
                    return call.frame, call.descriptors
                if call.error is not None:
                    raise DaemonUnavailable(f"{call.error} ({self.path})")
                if time.monotonic() >= deadline:
                    raise DaemonUnavailable(f"no answer to {op!r} within {timeout:g} s ({self.path})")
                with self._lock:
                    leads = self._lead_or_park(call)
        except BaseException:
            with self._lock:
                self._forget(call)
            # The reply may have come while we gave up; its descriptors have no other owner.
            _close_all(call.descriptors)
            raise
        finally:
            with self._lock:
                self._leave(call)

    def _lead_or_park(self, call: _Call) -> bool:
        """Make ``call`` the reader if there is none but the watcher; else have it woken by its reply or a hand-over."""
        if self._lead(call):
            return True
        # A wake-up that came just as its wait ended; `wake` must be locked to be released again.
        call.wake.acquire(blocking=False)
        call.parked = True
        self._parked[call.correlation] = call
        if call.done:
            self._unpark(call)
        return False

    def _lead(self, call: _Call) -> bool:
        if self._reader is None or self._reader is self._watcher:
            self._reader = call
            self._polling += 1
        return self._reader is call

    def _unpark(self, call: _Call) -> None:
        if call.parked:
            call.parked = False
            self._parked.pop(call.correlation, None)
            call.wake.release()

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.correlation, None)
        if self._unsent:
            self._unsent = deque(each for each in self._unsent if each.begun or each.correlation != call.correlation)

    def _leave(self, call: _Call) -> None:
        if call.parked:
            call.parked = False
            self._parked.pop(call.correlation, None)
        if self._reader is call:
            self._reader = None
            self._polling -= 1
            if self._doomed:
                self._bury()
        # Also when we did not lead: perhaps the reading was handed to us as we gave up.
        if self._parked and self._reader is None:
            self._unpark(next(iter(self._parked.values())))
        self._active_at = time.monotonic()

    # ----------------------------------------------------------------------------------------------------- sending

    def _unavailable(self) -> NoReturn:
        raise DaemonUnavailable(f"{self._failure} ({self.path})")

    def _send(self, correlation: int, frame: bytes) -> None:
        """Hand ``frame`` to the socket, or queue what it does not take behind what it did not take before."""
        if self._socket is None:
            self._unavailable()
        sent = 0
        if not self._unsent:
            try:
                sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail(f"the daemon is gone: {error.strerror}")
                self._unavailable()
        if sent < len(frame):
            self._unsent.append(_Unsent(correlation, memoryview(frame)[sent:], sent > 0))

    def _flush(self) -> None:
        while self._unsent and self._socket is not None:
            first = self._unsent[0]
            try:
                sent = self._socket.send(first.rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(f"the daemon is gone: {error.strerror}")
                return
            first.rest = first.rest[sent:]
            first.begun = True
            if not first.rest:
                self._unsent.popleft()

    def _push(self, call: _Call, deadline: float) -> None:
        """Wait until ``call``'s frame is out, or its deadline.

        It reads meanwhile if nobody else does: two sides that only write would block one another.
        """
        poller = select.poll()
        with self._lock:
            if self._socket is None:
                return
            number = self._socket.fileno()
            self._polling += 1
        try:
            while True:
                with self._lock:
                    self._flush()
                    if call.done or all(each.correlation != call.correlation for each in self._unsent):
                        return
                    leads = self._lead(call)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return
                poller.register(number, select.POLLOUT | (select.POLLIN if leads else 0))
                ready = poller.poll(math.ceil(remaining * 1000))
                if leads and ready and ready[0][1] & ~select.POLLOUT:
                    with self._lock:
                        events = self._receive()
                    self._deliver(events)
        finally:
            with self._lock:
                self._polling -= 1
                self._bury()

    # ----------------------------------------------------------------------------------------------------- reading

    def _read_for(self, call: _Call, deadline: float) -> None:
        """Read for everybody until ``call`` is done or its deadline is over."""
        poll = self._poller.poll
        while not call.done:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if not poll(math.ceil(remaining * 1000)):
                return
            with self._lock:
                events = self._receive()
            if events:
                self._deliver(events)

    def _receive(self) -> list[tuple[str, dict[str, Any]]]:
        """Take what the socket holds and dispatch it; return the events, to be delivered without the lock.

        Under the lock, so that no call that wants descriptors can be sent between the choice of recv() and recv()
        itself: the kernel throws away descriptors that nobody made room for.
        """
        events: list[tuple[str, dict[str, Any]]] = []
        if self._socket is None:
            return events
        try:
            if self._wanting:
                data = self._receive_with_fds(self._socket)
            else:
                data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                self._fail("the daemon closed the connection")
                return events
            for frame in self._decoder.feed(data):
                if frame.kind == Kind.EVENT:
                    body = decode_body(frame.body)
                    events.append((take(body, "event", str), body))
                else:
                    self._dispatch(frame)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(f"the daemon is gone: {error.strerror}")
        except ProtocolError as error:
            self._fail(f"the daemon broke the protocol: {error}")
        except BaseException:
            # A signal's exception may have struck between taking bytes and keeping them: the stream is lost.
            self._fail("reading was interrupted")
            raise
        return events

    def _receive_with_fds(self, from_socket: socket.socket) -> bytes:
        # Kernels end a read behind a piece that carries descriptors, so one piece's worth of room suffices.
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = from_socket.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, packed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(packed[: len(packed) - len(packed) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("more descriptors than a frame may bring")
        return data

    def _dispatch(self, frame: Frame) -> None:
        if frame.kind == Kind.REQUEST:
            raise ProtocolError("a request from the daemon")
        wanted = frame.correlation in self._wanting
        self._wanting.discard(frame.correlation)
        if frame.descriptors and not wanted:
            raise ProtocolError("descriptors that nobody asked for")
        if frame.descriptors > len(self._descriptors):
            raise ProtocolError(f"{len(self._descriptors)} descriptors came, {frame.descriptors} were announced")
        descriptors = [self._descriptors.popleft() for _ in range(frame.descriptors)]
        if not self._wanting and self._descriptors:
            _close_all(descriptors)
            raise ProtocolError(f"{len(self._descriptors)} descriptors came that no frame announced")
        call = self._calls.pop(frame.correlation, None)
        if call is None:
            # Late: its caller has given up.
            _close_all(descriptors)
            return
        call.descriptors = descriptors
        call.frame = frame
        self._unpark(call)

    def _deliver(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        for event, body in events:
            if self._callback is None:
                continue
            try:
                self._callback(event, body)
            except Exception:
                log.exception("event callback failed event=%s", event)

    def _watch(self, watched: socket.socket, stopped: threading.Event) -> None:
        """Read while nobody calls, send on what got stuck; ends with the connection."""
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        me = threading.current_thread()
        while True:
            with self._lock:
                if self._socket is not watched:
                    return
                self._flush()
                stuck = bool(self._unsent)
                pause = IDLE_S - (time.monotonic() - self._active_at)
                if self._calls or self._reader is not None:
                    pause = IDLE_S
                if pause <= 0:
                    self._reader = me
                    self._polling += 1
            if pause > 0:
                stopped.wait(pause)
                continue
            ready = poller.poll((IDLE_S if stuck else WATCH_S) * 1000)
            events: list[tuple[str, dict[str, Any]]] = []
            with self._lock:
                self._polling -= 1
                if self._reader is me:
                    if ready:
                        events = self._receive()
                    self._reader = None
                    if self._parked:
                        self._unpark(next(iter(self._parked.values())))
                self._bury()
            self._deliver(events)


def _close_all(numbers: list[int]) -> None:
    while numbers:
        os.close(numbers.pop())


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _reset_clients() -> None:
    for client in list(_clients):
        client._forked()


# The pid check in every call catches forks that do not go through Python; this one frees the descriptor at once.
os.register_at_fork(after_in_child=_reset_clients)
