"""The Redis tier against a real redis-server: bytes that are true, and every trouble a counted miss."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines.redis_server import RedisServer, serve
from engines.redis_tier import SECRET, SIZE, available, check, fetches, name, opened, pattern, probed, sends, settings

from kvcascade.config.errors import ConfigError, TierUnavailable
from kvcascade.tiers import redis as module
from kvcascade.tiers import value
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.redis_wire import Topology
from kvcascade.tiers.remote import BlockName, Secret, Send


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("secret", [SECRET, Secret()])
async def test_what_was_stored_is_fetched(server: RedisServer, codec: Codec, secret: Secret) -> None:
    async with opened(server.url, secret, codec) as tier:
        assert await tier.store(sends(range(40)), 5) == [None] * 40
        assert await tier.present([name(n) for n in range(50)], 5) == 40
        seen: list[tuple[int, float, float, int]] = []
        jobs = fetches(range(40))
        reasons = await tier.fetch(jobs, 5, observe=lambda *one: seen.append(one))
        assert reasons == [None] * 40
        check(jobs, reasons, range(40))
        ((nbytes, seconds, first, sent),) = seen
        assert nbytes == sent == 40 * SIZE and 0 < first <= seconds  # what is noise is not packed
        assert 0 < server.client().pttl(tier.key_of(name(3))) <= 24 * 3600 * 1000


async def test_what_crosses_the_link_is_told_both_ways(server: RedisServer) -> None:
    """By that the next payloads are packed; a node that only stores would never know."""
    told: list[tuple[int, float, float, int]] = []
    tier = RedisTier(settings(server.url), SECRET, codec=lambda: Codec.ZSTD, sent=lambda *one: told.append(one))
    await tier.open()
    try:
        await probed(tier)
        zeros = [Send(name(n), b"", memoryview(bytes(SIZE)), 2) for n in range(20)]
        assert await tier.store(zeros, 5) == [None] * 20
        assert await tier.fetch(fetches(range(20)), 5, observe=lambda *one: told.append(one)) == [None] * 20
    finally:
        await tier.close()
    assert [nbytes for nbytes, *_ in told] == [20 * SIZE] * 2
    # The low byte of each number is not packed, and its header and command are sent too.
    assert all(10 * SIZE < sent < 11 * SIZE for *_, sent in told)
    assert all(0 <= first < seconds for _, seconds, first, _ in told)


async def test_large_blocks_and_many_at_once(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        assert await tier.store(sends(range(8), 2 << 20), 5) == [None] * 8
        batches = [fetches(range(8), 2 << 20) for _ in range(3)]
        for jobs, reasons in zip(batches, await asyncio.gather(*(tier.fetch(j, 5) for j in batches)), strict=True):
            assert reasons == [None] * 8
            check(jobs, reasons, range(8))


async def test_over_a_unix_socket(server: RedisServer) -> None:
    async with opened(f"unix://{server.socket}") as tier:
        assert await tier.store(sends(range(3)), 5) == [None] * 3
        assert await tier.fetch(fetches(range(3)), 5) == [None] * 3


async def test_a_hole_moves_nothing(server: RedisServer) -> None:
    """Fault H: what lies behind a hole keeps its place."""
    async with opened(server.url) as tier:
        await tier.store(sends(range(10)), 5)
        server.client().delete(tier.key_of(name(4)))
        assert await tier.present([name(n) for n in range(10)], 5) == 4
        jobs = fetches(range(10))
        reasons = await tier.fetch(jobs, 5)
        assert [number for number, reason in enumerate(reasons) if reason] == [4]
        assert reasons[4] == "not there"
        check(jobs, reasons, range(10))


def _foreign(good: bytes) -> bytes:
    header = value.pack(name(9), b"", memoryview(pattern(9)), [pattern(9)], codec=0, element=2, secret=SECRET)
    return header + pattern(9)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda good: good[:100], "no value of ours"),
        (lambda good: good[:-1], "another length"),
        (lambda good: good + b"x", "another length"),
        (lambda good: b"", "no value of ours"),
        (lambda good: os.urandom(len(good)), "no value of ours"),
        (lambda good: good[:4] + b"\x09" + good[5:], "another format version"),
        (_foreign, "another block"),
        (lambda good: good[:-1] + bytes([good[-1] ^ 1]), "bad tag"),
        (lambda good: good[:128] + bytes(32) + good[160:], "bad tag"),
    ],
)
async def test_a_value_that_is_not_the_block_is_a_miss(
    server: RedisServer, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    """Whatever a writer of Redis puts there, also other blocks' authentic values; and the connection stays in step."""
    async with opened(server.url) as tier:
        await tier.store(sends(range(5)), 5)
        client = server.client()
        good = client.get(tier.key_of(name(2)))
        client.set(tier.key_of(name(2)), spoil(good))
        for _ in range(3):
            jobs = fetches(range(5))
            assert await tier.fetch(jobs, 5) == [None, None, reason, None, None]
            for n in (0, 1, 3, 4):
                assert bytes(jobs[n].into) == pattern(n)
        assert tier.available
        await tier.forget([name(2)])
        assert (await tier.fetch(fetches(range(3)), 5))[2] == "not there"


async def test_keys_of_another_type_are_misses(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        await tier.store(sends(range(3)), 5)
        client = server.client()
        client.delete(tier.key_of(name(1)))
        client.lpush(tier.key_of(name(1)), b"a list")
        reasons = await tier.fetch(fetches(range(3)), 5)
        assert reasons[0] is None and reasons[2] is None and reasons[1] == "no value of ours"
        client.lpush(b"kvcascade:small", b"a list")
        await tier.write([(b"other", b"text")], 10, 5)
        assert await tier.read([b"small", b"other", b"none"], 5) == [None, b"text", None]


async def test_the_names_of_a_question_are_made_by_another_thread_than_the_loops(server: RedisServer) -> None:
    """Those of a long one take 10 ms."""
    made: set[int] = set()

    def names() -> Iterator[BlockName]:
        for number in range(3000):
            made.add(threading.get_ident())
            yield name(number)

    async with opened(server.url) as tier:
        await tier.store(sends(range(2000)), 5)
        assert await tier.present(names(), 5) == 2000
    assert made and threading.get_ident() not in made


async def test_nothing_is_asked_for_far_behind_a_hole(server: RedisServer) -> None:
    async with opened(server.url, deadline="30s") as tier:
        jobs = sends(range(5000), 64)
        assert set(await tier.store(jobs, 60.0)) == {None}
        server.client().delete(tier.key_of(name(1500)))
        server.client().config_resetstat()
        assert await tier.present((name(number) for number in range(5000)), 30.0) == 1500
        assert server.client().info("commandstats")["cmdstat_exists"]["calls"] <= 2048


async def test_redis_away_at_the_start_and_back_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "r")
    async with opened(server.url) as tier:
        assert not tier.available
        assert "refused" in str(tier.status()["reason"])
        with pytest.raises(TierUnavailable):
            await tier.present([name(0)], 1)
        assert await tier.fetch(fetches(range(1)), 1) != [None]
        server.start()
        try:
            await available(tier)
            assert await tier.store(sends(range(2)), 5) == [None] * 2
            server.kill()
            assert await tier.fetch(fetches(range(2)), 5) != [None, None]
            assert not tier.available
            server.start()
            await available(tier)
            assert await tier.present([name(0)], 5) == 0
        finally:
            server.kill()


async def test_a_redis_that_does_not_answer_costs_its_deadline(server: RedisServer) -> None:
    """Unknown is not absent: no answer is an error, not a 0."""
    async with opened(server.url) as tier:
        await tier.store(sends(range(2)), 5)
        server.stop()
        try:
            with pytest.raises(TierUnavailable, match="no answer in time"):
                await tier.present([name(0)], 5)
            assert not tier.available
        finally:
            server.resume()
        await available(tier)
        assert await tier.fetch(fetches(range(2)), 5) == [None, None]


async def test_a_question_that_waits_for_our_own_others_says_nothing_of_redis(server: RedisServer) -> None:
    asked, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly() -> Iterator[BlockName]:
        loop.call_soon_threadsafe(asked.set)
        go_on.wait(60)
        yield name(0)

    async with opened(server.url, deadline="30s") as tier:
        await tier.store(sends(range(1)), 30.0)
        first = asyncio.create_task(tier.present(slowly(), 30.0))
        await asked.wait()
        waits = asyncio.create_task(tier.present([name(0)], 0.05))
        with pytest.raises(TierUnavailable):
            await waits
        # One whose turn comes when its time is over.
        late = asyncio.create_task(tier.present([name(0)], 0.05))
        await asyncio.sleep(0.08)
        go_on.set()
        assert await first == 1
        with pytest.raises(TierUnavailable):
            await late
        assert tier.available and not tier.counters["failures"]


async def test_a_wrong_password_is_a_state(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("right\n")
    password.chmod(0o600)
    with serve(password="right") as server:
        async with opened(server.url.replace("redis://", "redis://:wrong@")) as tier:
            assert not tier.available
            told = tier.status()
            assert "wrong" not in str(told["url"]) and "password" in str(told["reason"]).lower()
        async with opened(server.url, password_file=str(password)) as tier:
            assert tier.available


@pytest.mark.parametrize(("pause", "told"), [(0.0, ["refused", "NOAUTH"]), (3600.0, ["refused"])])
async def test_the_log_tells_another_reason_for_which_redis_is_away_once_and_not_too_soon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pause: float,
    told: list[str],
) -> None:
    monkeypatch.setattr(module, "TELL_S", pause)
    server = RedisServer(tmp_path / "r", password="of nobody here")
    async with opened(server.url) as tier:
        server.start()
        try:
            reasons: list[str] = []
            for _ in range(600):
                reasons += [str(tier.status()["reason"])]
                if sum("NOAUTH" in reason for reason in reasons) > 60:  # several probes of the same outcome
                    break
                await asyncio.sleep(0.05)
            assert "NOAUTH" in reasons[-1]
        finally:
            lines = [record.getMessage() for record in caplog.records if record.name == "kvcascade.redis"]
            server.kill()
        assert len(lines) == len(told)
        assert all(word in line for word, line in zip(told, lines, strict=True)), lines


async def test_an_error_that_says_nothing_is_an_error(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(server.url) as tier:
        monkeypatch.setattr(Topology, "learn", lambda _: (_ for _ in ()).throw(AssertionError))
        await available(tier, False)
        assert tier.status()["reason"]
        monkeypatch.undo()
        await available(tier)


async def test_a_user_who_may_not_write_is_told(server: RedisServer) -> None:
    server.client().execute_command("ACL", "SETUSER", "reader", "on", ">pass", "~*", "+@read", "+@connection", "+info")
    async with opened(server.url) as tier:
        await tier.store(sends(range(2)), 5)
    async with opened(server.url.replace("redis://", "redis://reader:pass@")) as tier:
        assert await tier.fetch(fetches(range(2)), 5) == [None, None]
        reasons = await tier.store(sends(range(2, 4)), 5)
        assert all(str(reason).startswith("NOPERM") for reason in reasons)
        assert tier.available


async def test_a_full_redis_takes_nothing_and_gives_what_it_has(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        await tier.store(sends(range(4)), 5)
        client = server.client()
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        reasons = await tier.store(sends(range(4, 8)), 5)
        assert all(str(reason).startswith("OOM") for reason in reasons)
        assert tier.available
        assert await tier.fetch(fetches(range(4)), 5) == [None] * 4


async def test_a_replica_takes_no_writes(server: RedisServer) -> None:
    with serve("--replicaof", "127.0.0.1", str(server.port)) as replica:
        async with opened(replica.url) as tier:
            reasons = await tier.store(sends(range(2)), 5)
            assert all(str(reason).startswith("READONLY") for reason in reasons)
            assert tier.status()["role"] == "slave"
            replica.client().execute_command("REPLICAOF", "NO", "ONE")
            assert await tier.store(sends(range(2)), 5) == [None, None]


async def test_a_cancelled_fetch_leaves_no_reply_to_a_later_question(server: RedisServer) -> None:
    """Fault G1: with replies off by one callers would get each other's blocks."""
    async with opened(server.url) as tier:
        await tier.store(sends(range(64)), 5)
        for round_ in range(30):
            numbers = range(round_, round_ + 30)
            jobs = fetches(numbers)
            task = asyncio.create_task(tier.fetch(jobs, 5))
            await asyncio.sleep(0.0005 * (round_ % 10))
            task.cancel()
            await asyncio.wait([task])
            before = [bytes(job.into) for job in jobs]
            after = fetches(range(5))
            reasons = await tier.fetch(after, 5)
            assert reasons == [None] * 5
            check(after, reasons, range(5))
            # Once it is over nobody writes into the caller's memory.
            assert before == [bytes(job.into) for job in jobs]


async def test_the_daily_budget_is_kept(server: RedisServer) -> None:
    async with opened(server.url, daily_bytes=1 << 20) as tier:
        assert await tier.store(sends(range(12)), 5) == [None] * 12
        assert await tier.store(sends(range(12, 20)), 5) == [None] * 4 + ["redis.daily_bytes is used up"] * 4
        assert await tier.store(sends(range(20, 21)), 5) == ["redis.daily_bytes is used up"]
        assert tier.status()["written_today"] == 1 << 20
        assert await tier.present([name(n) for n in range(20)], 5) == 16


async def test_blocks_that_were_not_taken_are_not_of_the_budget(server: RedisServer) -> None:
    server.client().config_set("maxmemory-policy", "noeviction")
    server.client().config_set("maxmemory", "1mb")
    async with opened(server.url, daily_bytes=1 << 20) as tier:
        assert None not in await tier.store(sends(range(4)), 5)
        assert tier.status()["written_today"] == 0
        assert tier.status()["memory_limit"] == 1 << 20 and tier.status()["policy"] == "noeviction"


async def test_a_user_who_may_do_no_more_than_needed(server: RedisServer) -> None:
    rights = ["~kvcascade:*", "+get", "+set", "+exists", "+pexpire", "+del", "+mget"]
    server.client().execute_command("ACL", "SETUSER", "engine", "on", ">pass", *rights)
    async with opened(server.url.replace("redis://", "redis://engine:pass@").removesuffix("/0")) as tier:
        assert tier.available
        assert await tier.store(sends(range(2)), 5) == [None] * 2
        assert await tier.fetch(fetches(range(2)), 5) == [None] * 2
        assert await tier.present([name(0), name(1), name(2)], 5) == 2
        await tier.renew([name(0)])
        await tier.forget([name(0)])
        assert await tier.present([name(0)], 5) == 0


async def test_used_blocks_live_on(server: RedisServer) -> None:
    async with opened(server.url, ttl="30s") as tier:
        await tier.store(sends(range(2)), 5)
        client = server.client()
        client.pexpire(tier.key_of(name(0)), 1000)
        await tier.renew([name(0), name(7)])
        assert client.pttl(tier.key_of(name(0))) > 20_000
        assert not client.exists(tier.key_of(name(7)))


async def test_closing_waits_for_no_answer_that_does_not_come(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        await tier.store(sends(range(2)), 5)
        server.stop()
        task = asyncio.create_task(tier.fetch(fetches(range(2)), 5))
        await asyncio.sleep(0.05)
    server.resume()
    assert await task != [None, None]


def test_what_can_never_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis\.password_file: .* cannot be read"):
        RedisTier(settings("redis://localhost", password_file=str(tmp_path / "none")), SECRET)
    with pytest.raises(ConfigError, match=r"redis\.tls_ca: .* is no file"):
        RedisTier(settings("rediss://localhost", tls_ca=str(tmp_path / "none")), SECRET)


@pytest.mark.parametrize(
    ("field", "scheme"), [("password_file", "redis"), ("sentinel_password_file", "redis+sentinel")]
)
def test_a_password_that_others_may_read_is_refused(tmp_path: Path, field: str, scheme: str) -> None:
    password = tmp_path / "password"
    password.write_text("a word\n")
    options = settings(
        f"{scheme}://localhost/master" if "sentinel" in scheme else "redis://h", **{field: str(password)}
    )
    for mode in (0o640, 0o604, 0o620):
        password.chmod(mode)
        with pytest.raises(ConfigError, match=rf"redis\.{field}: .* is open to others \(mode 0{mode:o}\)"):
            RedisTier(options, SECRET)
    password.chmod(0o400)
    RedisTier(options, SECRET)
