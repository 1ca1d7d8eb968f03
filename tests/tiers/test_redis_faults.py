"""The Redis tier over a bad network and against servers that are none: late, cut, mute, or talking nonsense."""

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import pytest
from engines.proxy import Proxy
from engines.redis_server import RedisCluster, RedisServer, serve, serve_cluster
from engines.redis_tier import SIZE, available, check, fetches, name, opened, pattern, sends

from kvcascade.config.errors import TierUnavailable
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import Fetch
from kvcascade.tiers.wire import LATE

BIG = 2 << 20
T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.port) as one:
        yield one


def url(proxy: Proxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


KEYS = 1000
SMALL = 4 << 10


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", ["one server", "cluster"])
async def test_cancelled_questions_never_get_each_others_answers(kind: str, threads: int) -> None:
    """Fault G1: all replies on a connection off by one, after a cancelled command."""
    proxies: list[Proxy] = []
    with ExitStack() as stack:

        def between(port: int) -> int:
            proxies.append(stack.enter_context(Proxy(port)))
            return proxies[-1].port

        def prepare(cluster: RedisCluster) -> None:
            for number, one in enumerate(cluster.nodes):
                cluster.announce(number, between(one.port))

        if kind == "cluster":
            where = stack.enter_context(serve_cluster(prepare=prepare)).url
        else:
            where = f"redis://127.0.0.1:{between(stack.enter_context(serve()).port)}/0"
        async with opened(where, threads=threads, deadline="3s", connect_timeout="3s") as tier:
            keys = [b"k%04d" % n for n in range(KEYS)]
            await tier.write([(key, b"value of " + key) for key in keys], 600, 30)
            assert await tier.store(sends(range(KEYS), SMALL), 60) == [None] * KEYS
            for proxy in proxies:
                proxy.delay = 0.1
            chance = random.Random(1)
            answered: Counter[str] = Counter()

            async def within(what: str, call: Coroutine[Any, Any, T]) -> T | None:
                with suppress(TimeoutError, TierUnavailable):
                    async with asyncio.timeout(chance.uniform(0.02, 0.8)):
                        got = await call
                        answered[what] += 1
                        return got
                return None

            async def read(number: int) -> None:
                some = keys[number : number + chance.choice((1, 5))]
                got = await within("read", tier.read(some, 3))
                assert got in (None, [b"value of " + key for key in some])

            async def write(number: int) -> None:
                await within("write", tier.write([(keys[number], b"value of " + keys[number])], 600, 3))

            async def fetch(number: int) -> None:
                numbers = range(number, min(KEYS, number + chance.choice((1, 5))))
                jobs = fetches(numbers, SMALL)
                reasons = await within("fetch", tier.fetch(jobs, 3))
                if reasons is not None:
                    check(jobs, reasons, numbers)
                    answered["block"] += reasons.count(None)

            async def store(number: int) -> None:
                await within("store", tier.store(sends(range(number, number + 1), SMALL), 3))

            work = [(one, number) for number in range(KEYS) for one in (read, fetch)]
            work += [(one, number) for number in range(0, KEYS, 10) for one in (write, store)]
            chance.shuffle(work)
            for start in range(0, len(work), 100):
                await asyncio.gather(*(one(number) for one, number in work[start : start + 100]))
            assert answered["read"] and answered["block"]
            for proxy in proxies:
                proxy.delay = 0.0
            await available(tier)
            assert await tier.read(keys, 30) == [b"value of " + key for key in keys]
            jobs = fetches(range(KEYS), SMALL)
            reasons = await tier.fetch(jobs, 60)
            assert reasons == [None] * KEYS
            check(jobs, reasons, range(KEYS))


async def test_memory_is_let_go_of_when_the_time_is_up(server: RedisServer, proxy: Proxy) -> None:
    async with opened(url(proxy)) as tier:
        await tier.store(sends(range(4), BIG), 5)
        proxy.rate = 4 << 20
        jobs = fetches(range(4), BIG)
        began = time.monotonic()
        reasons = await tier.fetch(jobs, 0.3)
        assert time.monotonic() - began < 5
        assert "no answer in time" in reasons
        check(jobs, reasons, range(4))
        before = [bytes(job.into) for job in jobs]
        proxy.rate = 0
        again = fetches(range(4), BIG)
        await available(tier)
        assert await tier.fetch(again, 1) == [None] * 4
        assert before == [bytes(job.into) for job in jobs]


async def test_a_cancelled_fetch_ends_at_once(server: RedisServer, proxy: Proxy) -> None:
    async with opened(url(proxy)) as tier:
        await tier.store(sends(range(4), BIG), 5)
        proxy.hole = True
        task = asyncio.create_task(tier.fetch(fetches(range(4), BIG), 60))
        await asyncio.sleep(0.1)
        task.cancel()
        # Well before the deadline of the settings, 1 s, would end it.
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert done and task.cancelled()
        assert tier.available  # that a caller went says nothing of Redis
        proxy.hole = False
        assert await tier.fetch(fetches(range(4), BIG), 5) == [None] * 4


async def test_a_long_prefix_crosses_a_slow_link_in_its_own_time(server: RedisServer, proxy: Proxy) -> None:
    """The deadline of an answer, 1 s, is for how long nothing may move; the call's own one is for the whole."""
    async with opened(url(proxy), threads=1) as tier:
        await tier.store(sends(range(20), BIG), 60)
        proxy.rate = 8_000_000
        assert await tier.store(sends(range(20, 32), BIG), 60) == [None] * 12
        jobs = fetches(range(32), BIG)
        began = time.monotonic()
        reasons = await tier.fetch(jobs, 60)
        assert reasons == [None] * 32
        assert time.monotonic() - began > 5  # of the settings' deadline: the link was slow indeed
        check(jobs, reasons, range(32))


async def halfway(
    server: RedisServer, tier: RedisTier, jobs: list[Fetch], way: str, timeout: float
) -> "asyncio.Task[list[str | None]]":
    """Fetches or stores blocks that Redis has; two are at their place when this returns."""
    numbers = range(len(jobs))
    if way == "store":
        server.client().flushall()
    moving = tier.fetch(jobs, timeout) if way == "fetch" else tier.store(sends(numbers, BIG), timeout)
    task = asyncio.create_task(moving)
    for _ in range(1000):
        there = jobs[1].into == pattern(1, BIG) if way == "fetch" else server.client().exists(tier.key_of(name(1))) == 1
        if there:
            return task
        await asyncio.sleep(0.01)
    raise AssertionError("no block arrives")


@pytest.mark.parametrize("way", ["fetch", "store"])
async def test_a_link_that_goes_dead_is_given_up_long_before_the_whole_deadline(
    server: RedisServer, proxy: Proxy, way: str
) -> None:
    async with opened(url(proxy), threads=1) as tier:
        await tier.store(sends(range(16), BIG), 60)
        proxy.rate = 8_000_000
        jobs = fetches(range(16), BIG)
        task = await halfway(server, tier, jobs, way, 600)
        proxy.hole = True
        async with asyncio.timeout(60):
            reasons = await task
        # What came whole before is good, and the circuit is open.
        good = reasons.index("no byte moved for too long")
        assert (good > 0 or way == "store") and reasons == [None] * good + ["no byte moved for too long"] * (16 - good)
        if way == "fetch":
            check(jobs, reasons, range(16))
        assert not tier.available
        proxy.hole, proxy.rate = False, 0
        await available(tier)
        assert await tier.store(sends(range(16), BIG), 60) == [None] * 16


async def test_an_answer_that_is_late_for_somebody_in_a_hurry_does_not_say_that_redis_is_away(
    server: RedisServer, proxy: Proxy
) -> None:
    async with opened(url(proxy), deadline="30s") as tier:
        await tier.store(sends(range(2)), 30.0)
        proxy.delay = 0.3
        assert await tier.fetch(fetches(range(2)), 0.1) == [LATE, LATE]
        with pytest.raises(TierUnavailable, match=LATE):
            await tier.present([name(0)], 0.1)
        assert tier.available and not tier.counters["failures"]
        assert await tier.present([name(0)], 30.0) == 1


@pytest.mark.parametrize("way", ["fetch", "store"])
async def test_a_trickle_ends_with_the_whole_deadline(server: RedisServer, proxy: Proxy, way: str) -> None:
    """Who sends a byte now and then is never silent."""
    async with opened(url(proxy), threads=1) as tier:
        await tier.store(sends(range(4), BIG), 60)
        proxy.rate = 8_000_000
        jobs = fetches(range(4), BIG)
        task = await halfway(server, tier, jobs, way, 6)
        proxy.rate = 20
        async with asyncio.timeout(60):
            reasons = await task
        good = next(number for number, reason in enumerate(reasons) if reason)
        assert good > 0 or way == "store"  # it may be there and its answer not here
        if way == "fetch":
            assert reasons[good:] == ["no answer in time"] * (4 - good)
            check(jobs, reasons, range(4))
        proxy.rate = 0
        proxy.reset()
        await available(tier)
        assert await tier.store(sends(range(4), BIG), 60) == [None] * 4


async def test_a_prefix_that_is_cut_off_keeps_what_has_come(server: RedisServer, proxy: Proxy) -> None:
    async with opened(url(proxy), threads=1) as tier:
        await tier.store(sends(range(16), BIG), 60)
        proxy.rate = 8_000_000
        jobs = fetches(range(16), BIG)
        reasons = await tier.fetch(jobs, 2)
        good = reasons.index("no answer in time")
        assert good > 0 and reasons == [None] * good + ["no answer in time"] * (16 - good)
        check(jobs, reasons, range(16))
        assert tier.available  # slow is not away


@pytest.mark.parametrize("after", [1, 50, 200, SIZE, 3 * SIZE + 77])
@pytest.mark.parametrize("end", ["cut", "half_close"])
async def test_a_connection_that_ends_in_the_middle(server: RedisServer, proxy: Proxy, after: int, end: str) -> None:
    async with opened(url(proxy)) as tier:
        await tier.store(sends(range(8)), 5)
        if end == "cut":
            proxy.cut_after = after
        else:
            proxy.half_close()
        jobs = fetches(range(8))
        reasons = await tier.fetch(jobs, 1)
        assert end == "half_close" or any(reasons)
        check(jobs, reasons, range(8))
        await available(tier)
        jobs = fetches(range(8))
        reasons = await tier.fetch(jobs, 1)
        assert reasons == [None] * 8
        check(jobs, reasons, range(8))


async def test_a_block_cut_on_its_way_up_is_not_there(server: RedisServer, proxy: Proxy) -> None:
    async with opened(url(proxy)) as tier:
        proxy.rate = 8 << 20
        task = asyncio.create_task(tier.store(sends(range(4), BIG), 5))
        await asyncio.sleep(0.1)
        proxy.reset()
        assert await task != [None] * 4
        proxy.rate = 0
        await available(tier)
        jobs = fetches(range(4), BIG)
        reasons = await tier.fetch(jobs, 1)
        check(jobs, reasons, range(4))
        assert set(reasons) <= {None, "not there"}


async def test_a_network_that_flaps_costs_misses_alone(server: RedisServer, proxy: Proxy) -> None:
    """Fault G9: the circuit opens, and closes by itself each time."""
    async with opened(url(proxy)) as tier:
        await tier.store(sends(range(8)), 5)
        for way in ("refuse", "hole", "refuse"):
            setattr(proxy, way, True)
            if way == "refuse":
                proxy.reset()
            await available_after_fetches(tier, False)
            began = time.monotonic()
            for _ in range(50):
                assert await tier.fetch(fetches(range(8)), 5) != [None] * 8
            assert time.monotonic() - began < 5  # the circuit is open: none of them waits for a deadline
            setattr(proxy, way, False)
            await available(tier)
            jobs = fetches(range(8))
            reasons = await tier.fetch(jobs, 5)
            assert reasons == [None] * 8
            check(jobs, reasons, range(8))


async def available_after_fetches(tier: object, wanted: bool) -> None:
    for _ in range(100):
        if tier.available == wanted:  # type: ignore[attr-defined]
            return
        await tier.fetch(fetches(range(8)), 0.3)  # type: ignore[attr-defined]
    raise AssertionError("the circuit stays closed")


@pytest.mark.parametrize("threads", [1, 8])
async def test_a_storm_of_cancelled_calls_leaves_as_many_connections_as_threads(
    server: RedisServer, threads: int
) -> None:
    """Fault G2."""
    async with opened(server.url, threads=threads, deadline="30s") as tier:
        await tier.store(sends(range(30), SMALL), 60)
        chance = random.Random(2)
        tasks = []
        for number in range(5000):
            numbers = range(first := chance.randrange(27), first + 3)
            call = tier.fetch(fetches(numbers, SMALL), 60) if number % 5 else tier.present([name(first)], 30)
            tasks.append(asyncio.create_task(call))
        for victim in chance.sample(tasks, 1700):
            if chance.random() < 0.05:
                await asyncio.sleep(0.001)
            victim.cancel()
        await asyncio.wait(tasks)
        assert sum(task.cancelled() for task in tasks) > 500
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert await tier.fetch(fetches(range(30), SMALL), 30) == [None] * 30
        assert tier.available
        # Those that fetch and send, small, probe; the test's own.
        assert len(server.client().client_list()) <= threads + max(1, threads // 2) + 1 + 1 + 2
    assert len(asyncio.all_tasks()) == 1


async def test_a_redis_that_evicts_as_it_likes_gives_whole_blocks_or_none() -> None:
    """Fault G4: a block is one value, so nothing of it can go alone; and keys expire and are deleted by others too."""
    chance = random.Random(4)
    with serve("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server:
        async with opened(server.url, deadline="5s") as tier:
            found: Counter[str | None] = Counter()
            taken: Counter[str | None] = Counter()

            def some() -> range:
                return range(first := chance.randrange(760), first + 40)

            async def store() -> None:
                for _ in range(40):
                    taken.update(await tier.store(sends(some()), 30))

            async def fetch() -> None:
                for _ in range(80):
                    numbers = some()
                    await tier.present([name(n) for n in numbers], 5)
                    jobs = fetches(numbers)
                    reasons = await tier.fetch(jobs, 30)
                    check(jobs, reasons, numbers)
                    found.update(reasons)

            def meddle() -> None:
                client = server.client()
                while not over.wait(0.002):
                    key = tier.key_of(name(chance.randrange(800)))
                    chance.choice([client.delete, client.unlink, lambda one: client.pexpire(one, 1)])(key)
                client.close()

            over = threading.Event()
            meddling = asyncio.create_task(asyncio.to_thread(meddle))
            await asyncio.gather(store(), store(), fetch(), fetch())
            over.set()
            await meddling
            assert server.client().info("stats")["evicted_keys"]
            assert found[None] > 100 and found["not there"] > 100
            assert set(found) == {None, "not there"} and set(taken) == {None}
            assert tier.available
            there = [bool(server.client().exists(tier.key_of(name(n)))) for n in range(800)]
            assert await tier.renew([name(n) for n in range(800)]) == there
            jobs = fetches(range(800))
            assert [reason is None for reason in await tier.fetch(jobs, 30)] == there


class Fake:
    """A server that answers whatever comes with what `say` makes up."""

    def __init__(self, say: Callable[[bytes], bytes]) -> None:
        self._say = say
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._talk, args=(client,)))
            self._threads[-1].start()

    def _talk(self, client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(1 << 16):
                    client.sendall(self._say(data))
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


NONSENSE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"$5\r\nabc",
    b"$-7\r\n",
    b"$abc\r\n",
    b"$99999999999999999999999\r\n",
    b":\r\n",
    b"*99999999999\r\n",
    b"*-3\r\n",
    b"*1\r\n" * 5000,
    b"\n",
    b"x" * 100_000,
    b"$3\r\nabcde",
    b"%1\r\n+a\r\n+b\r\n",
    b"-\r\n",
    b"-MOVED\r\n",
    b"-MOVED 1 :x\r\n",
    b"-ASK 1 127.0.0.1:1\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-NOAUTH Authentication required.\r\n",
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=range(len(NONSENSE)))
async def test_a_server_that_talks_nonsense_is_a_state(nonsense: bytes) -> None:
    def say(data: bytes) -> bytes:
        return b"+OK\r\n" if b"SELECT" in data else nonsense

    await _survives(say)


async def test_a_server_that_answers_probes_and_talks_nonsense_otherwise() -> None:
    chance = random.Random(3)

    def say(data: bytes) -> bytes:
        if b"INFO" in data:
            return b"$0\r\n\r\n" * data.count(b"INFO")
        kind = chance.randrange(4)
        if kind == 0:
            return chance.choice(NONSENSE)
        if kind == 1:
            return chance.randbytes(chance.randrange(200))
        size = chance.choice([0, 1, 159, 160, 161, SIZE + 160, SIZE + 161])
        head = b"kvcv\x01" if kind == 2 else b""
        return b"$%d\r\n%s" % (size, head) + chance.randbytes(max(0, size - len(head))) + b"\r\n"

    for _ in range(30):
        await _survives(say)


async def _survives(say: Callable[[bytes], bytes]) -> None:
    fake = Fake(say)
    try:
        async with opened(f"redis://127.0.0.1:{fake.port}/0") as tier:
            assert None not in await tier.fetch(fetches(range(3)), 0.2)
            for call in (tier.present([name(0)], 0.2), tier.read([b"a", b"b"], 0.2), tier.renew([name(0)])):
                with suppress(TierUnavailable):
                    await call
            await tier.store(sends(range(2)), 0.2)
            str(tier.status())
    finally:
        fake.close()


async def test_what_is_fetched_does_not_wait_for_what_is_sent(proxy: Proxy) -> None:
    """And its cost model is not told of a link whose first byte takes as long as others' blocks."""
    async with opened(url(proxy), deadline="5s") as tier:
        assert await tier.store(sends(range(2)), 20) == [None] * 2
        proxy.rate = 4 << 20
        sending = asyncio.create_task(tier.store(sends(range(10, 18), BIG), 30))  # takes 4 s
        await asyncio.sleep(0.2)
        jobs = fetches(range(2))
        assert await tier.fetch(jobs, 20) == [None] * 2
        check(jobs, [None] * 2, range(2))
        assert not sending.done()
        assert await sending == [None] * 8


async def test_a_server_that_accepts_and_says_nothing() -> None:
    """Fault G9 (3): neither opening, calls nor closing wait beyond their deadlines."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with opened(f"redis://127.0.0.1:{mute.getsockname()[1]}/0") as tier:
            assert not tier.available
            assert None not in await tier.fetch(fetches(range(3)), 5)
            with pytest.raises(TierUnavailable):
                await tier.present([name(0)], 5)


async def test_values_of_absurd_length_cost_their_own_blocks_alone(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        await tier.store(sends(range(12)), 5)
        client = server.client()
        for n in (3, 4, 9):
            client.setrange(tier.key_of(name(n)), 64 << 20, b"x")
        jobs = fetches(range(12))
        reasons = await tier.fetch(jobs, 5)
        assert [n for n, reason in enumerate(reasons) if reason == "another length"] == [3, 4, 9]
        assert reasons.count(None) == 9
        check(jobs, reasons, range(12))
        assert tier.available
