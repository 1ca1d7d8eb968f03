"""A scripted engine: a real process with a real session, driven step by step, that proves every byte that it loads.

A test holds an `Engine` and asks it over a pipe to attach, look up, reserve, copy a part, commit and so on; between two
steps it may stop or kill the process. Blocks are filled by an oracle: each 8 bytes are a function of the block's key
and of their place in it, and so a foreign word names the block that it belongs to.

Run as a program the file is the engine's side; its one argument is the descriptor of the pipe.
"""

import ctypes
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import numpy.typing as npt

from kvcascade.daemon.attachment import Load, Reservation, Session
from kvcascade.daemon.protocol import BlockState
from kvcascade.tiers.block import KVGroup, block_hashes, committers, extra_keys, head_range, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace

PATIENCE_S = 20.0
SEED = "0"
BLOCK_TOKENS = 16
GOLDEN = 0x9E3779B97F4A7C15  # odd, so that place → place * GOLDEN is one-to-one modulo 2^64

U8 = npt.NDArray[np.uint8]


# ---- what both sides know


def prompt(name: str, blocks: int) -> list[int]:
    """Token ids of as many full blocks; prompts of other names differ in every block's hash."""
    first = zlib.crc32(name.encode()) % 1_000_000
    return list(range(first, first + blocks * BLOCK_TOKENS))


def group(*, layers: int = 2, kv_heads: int = 4, head_dim: int = 64, kind: Any = "attention") -> KVGroup:
    """32 KiB a block unless told otherwise."""
    return KVGroup(BLOCK_TOKENS, layers=layers, kv_heads=kv_heads, head_dim=head_dim, kind=kind)


def namespace(
    *,
    model: str = "a model's digest",
    algo: str = "sha256_cbor",
    seed: str = SEED,
    key_scheme: str = "tagged-0.31",
    weights_epoch: str = "",
    **shape: Any,
) -> Namespace:
    return Namespace(
        model=model,
        weights_epoch=weights_epoch,
        kv_dtype="bfloat16",
        groups=(group(**shape),),
        kv_scales="",
        rope="",
        max_model_len=0,
        quantisation="",
        producer="scripted",
        hash_algo=algo,
        key_scheme=key_scheme,
        none_hash=none_hash(seed, algo),
    )


def hashes_of(tokens: Sequence[int], *, algo: str = "sha256_cbor", seed: str = SEED, salt: str = "") -> list[bytes]:
    """The chain of a prompt's full blocks."""
    extra = extra_keys(len(tokens), BLOCK_TOKENS, scheme="tagged-0.31", cache_salt=salt) if salt else None
    return list(block_hashes(tokens, BLOCK_TOKENS, algo=algo, seed=seed, extra_keys=extra))


def oracle(fingerprint: bytes, block_hash: bytes, nbytes: int) -> U8:
    """What a block's slot must hold; `nbytes` is a multiple of 8."""
    key = np.uint64(_key(fingerprint, block_hash))
    places = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(GOLDEN)
    return (places ^ key).view(np.uint8)


def origins(found: U8) -> set[int]:
    """The keys of the blocks that these bytes of one slot belong to; of torn bytes any number."""
    words = found.view(np.uint64)
    places = np.arange(len(words), dtype=np.uint64) * np.uint64(GOLDEN)
    return {int(key) for key in np.unique(words ^ places)}


def _key(fingerprint: bytes, block_hash: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(fingerprint + block_hash, digest_size=8).digest(), "little")


# ---- the test's side


class EngineError(Exception):
    """What the engine's step raised: the error's class name, then its text."""


class EngineDied(Exception):
    """The engine's process ended in the middle of a step."""


class Engine:
    """An engine's process. Steps are methods of `Side` by name; `begin` starts one and `result` waits for its end."""

    def __init__(self, socket_path: Path | str, *, prefix: Sequence[str] = (), **options: Any) -> None:
        """`prefix` is put before the command (`unshare ...`, `setpriv ...`); `options` are `Side`'s."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*prefix, sys.executable, "-P", __file__, str(theirs.fileno())]
            # A group of its own: a step of the test must reach the engine under its wrapper, too.
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._pipe = Connection(ours.detach())
        self._pending = False
        self.options = options
        self.pid: int = self.do("start", socket_path=str(socket_path), **options)

    def begin(self, step: str, /, *arguments: Any, **named: Any) -> None:
        assert not self._pending, "the last step has not ended"
        self._pipe.send_bytes(cbor2.dumps([step, arguments, named]))
        self._pending = True

    def result(self, timeout: float = PATIENCE_S) -> Any:
        """The end of the step that was begun; raises EngineError for what it raised."""
        if not self._pipe.poll(timeout):
            raise AssertionError(f"the engine's step did not end within {timeout} s")
        try:
            outcome, value = cbor2.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise EngineDied from error
        self._pending = False
        if outcome == "raised":
            raise EngineError(value)
        return value

    def ended(self, timeout: float) -> bool:
        """Whether the step that was begun ends within `timeout`."""
        return self._pipe.poll(timeout)

    def do(self, step: str, /, *arguments: Any, **named: Any) -> Any:
        self.begin(step, *arguments, **named)
        return self.result()

    def __getattr__(self, step: str) -> Callable[..., Any]:
        if step.startswith("_"):
            raise AttributeError(step)
        return lambda *arguments, **named: self.do(step, *arguments, **named)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all that it is, and wait for its end."""
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(PATIENCE_S)
        self._pipe.close()

    def close(self) -> None:
        """An orderly end, if it can still have one."""
        if self._pipe.closed:
            return
        self.wake()
        try:
            if not self._pending:
                self.do("close")
        except (EngineDied, EngineError, OSError):
            pass
        self.kill()


def eventually(condition: Callable[[], Any], timeout: float = PATIENCE_S) -> Any:
    """Polls for what no event tells; returns the first true value."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
    return value


@contextmanager
def engines() -> Iterator[Callable[..., Engine]]:
    """Starts engines; every one is ended at the end."""
    started: list[Engine] = []

    def start(daemon: Any, **options: Any) -> Engine:
        engine = Engine(getattr(daemon, "socket", daemon), **options)
        started.append(engine)
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.close()


# ---- the engine's side


class Side:
    """What the engine's process holds. Each public method is a step that a test may ask for."""

    def __init__(self) -> None:
        self._copies = ExitStack()
        self._reservation: Reservation | None = None
        self._chain: list[bytes] = []
        self._left: list[Session] = []

    def start(
        self,
        socket_path: str,
        role: str = "engine",
        ranks: int = 1,
        rank: int = 0,
        attachment: bytes = b"",
        timeout: float = 5.0,
        seed: str = SEED,
        probe_seed: str | None = None,
        family: str = "scripted",
        salt: str = "",
        **fields: Any,
    ) -> int:
        """`fields` are the namespace's. Attaches at the first use."""
        self._namespace = namespace(seed=seed, **fields)
        self._fingerprint = self._namespace.fingerprint()
        self._nbytes = self._namespace.block_bytes(0)
        self._seed, self._salt = seed, salt
        self._ranks, self._rank = ranks, rank
        algo, scheme = self._namespace.hash_algo, self._namespace.key_scheme
        root = none_hash(seed if probe_seed is None else probe_seed, algo)
        self._open = partial(
            Session,
            namespace=self._namespace.to_map(),
            probe=probe_hashes(algo=algo, none_hash=root, key_scheme=scheme),
            engine=(family, "1"),
            role=role,
            ranks=ranks,
            rank=rank,
            attachment=attachment,
            socket_path=socket_path,
            timeout=timeout,
        )
        self._session = self._open()
        return os.getpid()

    def again(self) -> None:
        """Another session of this process, which leaves the one it had as it is."""
        self._left.append(self._session)
        self._session = self._open()

    def attach(self, timeout: float | None = None) -> dict[str, Any]:
        info = self._session.attach(timeout)
        return {"boot": info.boot, "session": info.session, "attachment": info.attachment,
                "namespace": info.namespace, "warnings": list(info.warnings)}  # fmt: skip

    def attached(self) -> bool:
        return self._session.attached

    def join(self, attachment: bytes, rank: int) -> None:
        self._session.join(attachment, rank)

    def close(self) -> None:
        self._copies.close()
        self._session.close()

    def timed(self, step: str, /, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Another step, with the seconds that it took; what it raises is told by its class's name."""
        began = time.monotonic()
        try:
            value, error = getattr(self, step)(*arguments, **named), None
        except Exception as raised:
            value, error = None, type(raised).__name__
        return {"value": value, "error": error, "seconds": time.monotonic() - began}

    # ---- reading

    def lookup(self, tokens: list[int], request: str = "r", **options: Any) -> dict[str, Any]:
        found = self._session.lookup(self._hashes(tokens), request=request, **options)
        return {"lease": found.lease, "matched": found.matched, "ready": found.ready, "tiers": found.tiers.tolist(),
                "asking": found.asking}  # fmt: skip

    def lookup_alone(self, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        """The last block of each prompt, by itself."""
        named = b"".join(self._hashes(tokens)[-1] for tokens in prompts)
        looked = self._session.lookup(named, request="", pin=False, each=True, **options)
        found = [] if looked.found is None else looked.found.tolist()
        return {"found": found, "tiers": looked.tiers.tolist(), "asking": looked.asking}

    def lookup_told(self, tokens: list[int], told: list[int]) -> int:
        """How many blocks of `tokens` match when the daemon is told other token ids, or these."""
        found = self._session.lookup(self._hashes(tokens), request="told", tokens=told, pin=False)
        return found.matched

    def hand_off(self, tokens: list[int], keep_ms: int = 60_000) -> bytes:
        return self._session.hand_off(self._hashes(tokens), keep_ms=keep_ms)

    def computed(self, tokens: int, seconds: float, position: int = 0) -> None:
        self._session.computed(tokens, seconds, position=position)

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return self._hashes(tokens)

    def release(self, lease: int) -> None:
        self._session.release(lease)

    def failed(self, lease: int, blocks: list[int]) -> None:
        self._session.failed(lease, blocks)

    def load(self, lease: int, count: int, wait_ms: int = 0) -> int:
        """Asks where the blocks lie; `read` copies them."""
        self._load = self._session.load(lease, count, wait_ms=wait_ms)
        return self._load.count

    def pages(self) -> list[int]:
        """Where the blocks of the last load lie."""
        return list(self._load.pages.tolist())

    def read(self, tokens: list[int]) -> dict[str, list[int]]:
        """Copies what the last load gave, then asks what is intact."""
        with self._session.copying(self._load) as pools:
            copies = [pools[p].slot(page, self._nbytes).copy() for p, page in _places(self._load)]
        return self._judged(copies, self._load, tokens)

    def load_value(self, lease: int, count: int) -> list[Any]:
        """`load` for the ranks: a plain value that `read_value` takes in another process."""
        held = self._session.load(lease, count)
        return [held.boot, held.lease, held.count, held.pools.tobytes(), held.pages.tobytes(),
                held.generations.tobytes()]  # fmt: skip

    def read_value(self, value: list[Any], tokens: list[int]) -> dict[str, list[int]]:
        boot, lease, count, pools, pages, generations = value
        self._session.attach()
        self._load = Load(boot, lease, count, np.frombuffer(pools, np.uint8), np.frombuffer(pages, np.uint32),
                          np.frombuffer(generations, np.uint32))  # fmt: skip
        return self.read(tokens)

    def read_slowly(self, tokens: list[int]) -> None:
        """Begins to copy what the last load gave; `read_on` copies the rest."""
        pools = self._copies.enter_context(self._session.copying(self._load))
        half = self._nbytes // 2
        self._slow = [(pools[p].slot(page, self._nbytes)[half:], pools[p].slot(page, half).copy())
                      for p, page in _places(self._load)]  # fmt: skip

    def read_on(self, tokens: list[int]) -> dict[str, list[int]]:
        copies = [np.concatenate([head, tail.copy()]) for tail, head in self._slow]
        self._slow = []
        self._copies.close()
        return self._judged(copies, self._load, tokens)

    def _judged(self, copies: list[U8], load: Load, tokens: list[int]) -> dict[str, list[int]]:
        """Blocks that are intact, and those of them whose bytes are not theirs: a lie."""
        intact = self._session.intact(load).tolist()
        blocks = self._hashes(tokens)
        whole = [bool(np.array_equal(copy, oracle(self._fingerprint, block_hash, self._nbytes)))
                 for copy, block_hash in zip(copies, blocks, strict=False)]  # fmt: skip
        for i, good in enumerate(intact):
            if good and not whole[i]:
                known = {_key(self._fingerprint, block_hash): n for n, block_hash in enumerate(blocks)}
                found = [str(known.get(key, f"{key:x}")) for key in origins(copies[i])]
                print(f"block {i} is a lie: it holds words of {', '.join(found[:8])}", file=sys.stderr)
        return {
            "intact": [i for i, good in enumerate(intact) if good],
            "foreign": [i for i, good in enumerate(intact) if good and not whole[i]],
            "changed": [i for i, good in enumerate(whole) if not good],
        }

    def fetch(self, tokens: list[int], request: str = "r", wait_ms: int = 2000, **options: Any) -> dict[str, Any]:
        """Look up, load, copy, prove, release: what a prefill that meets a cache does."""
        found = self.lookup(tokens, request, **options)
        loaded = foreign = 0
        if found["lease"]:
            loaded = self.load(found["lease"], found["matched"], wait_ms)
            judged = self.read(tokens)
            foreign, loaded = len(judged["foreign"]), len(judged["intact"])
            self.release(found["lease"])
        return {"matched": found["matched"], "loaded": loaded, "foreign": foreign, "tiers": found["tiers"]}

    # ---- writing

    def reserve(self, tokens: list[int], start: int = 0, keep_tokens: bool = False) -> dict[str, Any]:
        self._chain = self._hashes(tokens)
        kept = tokens[start * BLOCK_TOKENS :] if keep_tokens else b""
        self._reservation = self._session.reserve(self._chain, request="r", start=start, tokens=kept)
        held = self._reservation
        return {
            "lease": held.lease,
            "states": [BlockState(state).name for state in held.states.tolist()],
            "blocks": held.blocks.tolist(),
            "hole": held.hole,
            "value": [held.boot, held.lease, held.start, held.states.tobytes(), held.blocks.tobytes(),
                      held.pools.tobytes(), held.pages.tobytes(), held.generations.tobytes()],
        }  # fmt: skip

    def probe_store(self, tokens: list[int]) -> None:
        """Reserves and gives up at once, beside the reservation that is held."""
        self._session.abort(self._session.reserve(self._hashes(tokens), request="probe").lease)

    def take_over(self, tokens: list[int], value: list[Any]) -> None:
        """A rank is told of the reservation that its scheduler made."""
        boot, lease, start, states, blocks, pools, pages, generations = value
        self._session.attach()
        self._chain = self._hashes(tokens)
        self._reservation = Reservation(
            boot, lease, start, np.frombuffer(states, np.uint8), np.frombuffer(blocks, np.uint32),
            np.frombuffer(pools, np.uint8), np.frombuffer(pages, np.uint32), np.frombuffer(generations, np.uint32), None
        )  # fmt: skip

    def write(self, part: float = 1.0) -> None:
        """Copies the leading `part` of this rank's range into each reserved slot."""
        with self._session.copying(self._held()):
            self._fill(part)

    def begin_copy(self) -> None:
        """As a copy that takes its time: its slots are being written until `end_copy`."""
        self._copies.enter_context(self._session.copying(self._held()))

    def fill(self, part: float = 1.0) -> None:
        """Writes within a copy that was begun, whatever the daemon thinks by now."""
        self._fill(part)

    def end_copy(self) -> None:
        self._copies.close()

    def commit(self, blocks: list[int] | None = None, lease: int | None = None) -> dict[str, int]:
        held = self._held()
        done = self._session.commit(lease or held.lease, self._mine(held.blocks.tolist()) if blocks is None else blocks)
        return {"ready": done.ready, "gone": done.gone}

    def abort(self, blocks: list[int] | None = None) -> None:
        self._session.abort(self._held().lease, blocks or [])

    def intact(self) -> list[bool]:
        return list(self._session.intact(self._held()).tolist())

    def store(self, tokens: list[int], start: int = 0, keep_tokens: bool = False) -> dict[str, Any]:
        """Reserve, copy, commit: what an engine does with what it has computed."""
        reserved = self.reserve(tokens, start, keep_tokens)
        ready = 0
        if reserved["blocks"]:
            self.write()
            ready = self.commit()["ready"]
        return {"states": reserved["states"], "ready": ready}

    def _held(self) -> Reservation:
        assert self._reservation is not None
        return self._reservation

    def _mine(self, blocks: list[int]) -> list[int]:
        shape = self._namespace.groups[0]
        return [b for b in blocks if self._rank in committers(shape.kv_heads, self._ranks, b, shape.kind)]

    def _fill(self, part: float) -> None:
        held, shape = self._held(), self._namespace.groups[0]
        first, count = head_range(shape.kv_heads, self._ranks, self._rank, shape.kind)
        head = self._nbytes // shape.kv_heads
        mine = set(self._mine(held.blocks.tolist()))
        for block, (pool, page) in zip(held.blocks.tolist(), _places(held), strict=True):
            if block in mine:
                at = slice(first * head, first * head + int(part * count * head))
                slot = self._session.pools[pool].slot(page, self._nbytes)
                slot[at] = oracle(self._fingerprint, self._chain[block], self._nbytes)[at]

    def _hashes(self, tokens: list[int]) -> list[bytes]:
        return hashes_of(tokens, algo=self._namespace.hash_algo, seed=self._seed, salt=self._salt)

    # ---- trouble

    def lose_socket(self) -> int:
        """Cuts the connection under the client; how many sockets there were."""
        cut = 0
        for path in list(Path("/proc/self/fd").iterdir()):
            try:
                held = socket.socket(fileno=os.dup(int(path.name)))
            except OSError:
                continue
            with held:
                try:
                    if held.family == socket.AF_UNIX and held.getpeername():
                        held.shutdown(socket.SHUT_RDWR)
                        cut += 1
                except OSError:
                    continue
        eventually(lambda: not self._session.attached)
        return cut

    def claim(self, token: bytes) -> None:
        """Says for another process's session that its copies have ended."""
        self._session._resume = token

    def fork(self) -> dict[str, Any]:
        """A child made by `os.fork` tries to go on with its parent's session; what it met."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                outcome = self.timed("lookup", prompt("fork", 1))
                os.write(writing, cbor2.dumps({**outcome, "attached": self._session.attached}))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told: dict[str, Any] = cbor2.loads(pipe.read())
        os.waitpid(child, 0)
        return told

    def fork_unnoticed(self) -> int:
        """A child that nobody tells, as a C library makes: it holds the socket open until it is killed."""
        child = ctypes.PyDLL(None).fork()
        if not child:
            signal.pause()
        return int(child)

    def storm(self, prompts: list[list[int]], wait_ms: int, promote: bool = True) -> list[dict[str, Any]]:
        """Looks up and loads all prompts at once, one thread each, while every lease is held until all have ended."""
        results: list[Any] = [None] * len(prompts)
        all_ended = threading.Barrier(len(prompts))

        def one(number: int) -> None:
            began = time.monotonic()
            loaded = foreign = matched = 0
            error = ""
            found = None
            try:
                found = self.lookup(prompts[number], f"storm {number}", promote=promote, timeout=PATIENCE_S)
                matched = found["matched"]
                if found["lease"]:
                    load = self._session.load(found["lease"], matched, wait_ms=wait_ms, timeout=PATIENCE_S)
                    with self._session.copying(load) as pools:
                        copies = [pools[p].slot(page, self._nbytes).copy() for p, page in _places(load)]
                    judged = self._judged(copies, load, prompts[number])
                    loaded, foreign = len(judged["intact"]), len(judged["foreign"])
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            seconds = time.monotonic() - began
            all_ended.wait(PATIENCE_S)
            if found is not None and found["lease"]:
                self.release(found["lease"])
            results[number] = {"matched": matched, "loaded": loaded, "foreign": foreign, "seconds": seconds,
                               "error": error}  # fmt: skip

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def misses(self, blocks: int, rounds: int) -> list[float]:
        """Seconds of the lookups of as many whole-chain misses."""
        seconds = []
        for number in range(rounds):
            chain = b"".join(hashlib.sha256(f"{number} {block}".encode()).digest() for block in range(blocks))
            began = time.perf_counter()
            found = self._session.lookup(chain, request=f"miss {number}")
            seconds.append(time.perf_counter() - began)
            assert found.matched == 0
        return seconds

    def work(self, seconds: float, names: int, blocks: int, seed: int) -> dict[str, int]:
        """Fetches and stores prompts at random until the time is over, through whatever happens to the daemon."""
        chance = np.random.default_rng(seed)
        told = {"fetched": 0, "stored": 0, "foreign": 0, "failed": 0}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tokens = prompt(f"prompt {chance.integers(names)}", int(chance.integers(1, blocks + 1)))
            try:
                got = self.fetch(tokens, wait_ms=200)
                told["fetched"] += got["loaded"]
                told["foreign"] += got["foreign"]
                if got["matched"] * BLOCK_TOKENS < len(tokens):
                    told["stored"] += self.store(tokens)["ready"]
            except Exception:
                told["failed"] += 1
                select.select([], [], [], 0.02)  # the daemon is away: do not spin through the back-off
        return told


def _places(held: Load | Reservation) -> list[tuple[int, int]]:
    return list(zip(held.pools.tolist(), held.pages.tolist(), strict=True))


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    side = Side()
    while True:
        try:
            step, arguments, named = cbor2.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ["done", getattr(side, step)(*arguments, **named)]
        except Exception as error:
            answer = ["raised", f"{type(error).__name__}: {error}"]
        pipe.send_bytes(cbor2.dumps(answer))


if __name__ == "__main__":
    main()
