"""Somebody who can read and write everything in Redis: at most misses for the fleet, and nothing to learn by names."""

import random
import time
import tracemalloc
from collections.abc import Iterator

import pytest
import redis
from engines.redis_server import RedisServer, serve
from engines.redis_tier import SECRET, SIZE, fetches, name, opened, pattern, sends

from kvcascade.tiers import value
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import BlockName, Secret, disproves

BLOCKS = range(6)
HEADER = value.HEADER_BYTES


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


def values(client: redis.Redis, tier: RedisTier, numbers: range = BLOCKS) -> list[bytes]:
    found = [client.get(tier.key_of(name(n))) for n in numbers]
    assert all(isinstance(one, bytes) for one in found)
    return found


def halves(number: int) -> bytes:
    """A payload that packs well: a constant byte beside a noisy one."""
    return b"".join(bytes([number, low]) for low in pattern(number, SIZE // 2))


def spoiled(good: bytes, other: bytes, chance: random.Random) -> bytes:
    """One of many ways to make another value of it."""
    at, length = chance.randrange(len(good)), chance.randrange(1, 200)
    head = chance.randrange(HEADER)
    return chance.choice(
        [
            good[:at] + bytes([good[at] ^ chance.randrange(1, 256)]) + good[at + 1 :],
            good[:head] + bytes([good[head] ^ 1 << chance.randrange(8)]) + good[head + 1 :],
            good[:at],
            good[:at] + good[at + length :],
            good[:at] + chance.randbytes(length) + good[at:],
            other[:at] + good[at:] if other[:at] != good[:at] else other,
            other[:HEADER] + good[HEADER:],
            good[:head] + chance.randbytes(8) + good[head + 8 :],
            good + good,
        ]
    )


@pytest.mark.parametrize("codec", list(Codec))
async def test_no_change_of_a_value_is_believed(server: RedisServer, codec: Codec) -> None:
    """With the secret every change is found out, and is known for one rather than for trouble on the way."""
    chance = random.Random(4711 + codec)
    payloads = [halves(n) for n in BLOCKS]
    jobs = [type(job)(job.name, job.parent, memoryview(payloads[n]), 2) for n, job in enumerate(sends(BLOCKS))]
    async with opened(server.url, SECRET, codec) as tier:
        client = server.client()
        assert await tier.store(jobs, 5) == [None] * len(BLOCKS)
        good = values(client, tier)
        for _ in range(60):
            victims = chance.sample(BLOCKS, 3)
            for n in victims:
                client.set(tier.key_of(name(n)), spoiled(good[n], chance.choice(good), chance))
            wanted = fetches(BLOCKS)
            reasons = await tier.fetch(wanted, 5)
            for n in BLOCKS:
                changed = client.get(tier.key_of(name(n))) != good[n]
                assert (reasons[n] is not None and disproves(reasons[n])) if changed else reasons[n] is None
                if reasons[n] is None:
                    assert bytes(wanted[n].into) == payloads[n]
            assert tier.available
            for n in victims:
                client.set(tier.key_of(name(n)), good[n])


async def test_without_a_secret_no_change_gives_other_bytes_unless_it_has_their_checksum(server: RedisServer) -> None:
    chance = random.Random(11)
    async with opened(server.url, Secret()) as tier:
        client = server.client()
        await tier.store(sends(BLOCKS), 5)
        good = values(client, tier)
        for _ in range(60):
            client.set(tier.key_of(name(2)), spoiled(good[2], chance.choice(good), chance))
            (job,) = fetches(range(2, 3))
            (reason,) = await tier.fetch([job], 5)
            assert reason is not None or bytes(job.into) == pattern(2)
        # What the module says plainly: a writer who makes the checksum, too, passes for the fleet.
        forged = memoryview(pattern(77))
        head = value.pack(name(2), b"", forged, [forged], codec=0, element=2, secret=Secret())
        client.set(tier.key_of(name(2)), head + forged)
        assert await tier.fetch([job], 5) == [None]
    # With one that same writer makes a miss.
    async with opened(server.url) as tier:
        client.set(tier.key_of(name(2)), head + forged)
        (reason,) = await tier.fetch([job], 5)
        assert reason is not None and disproves(reason)


async def test_the_authentic_value_of_another_block_is_refused_under_every_key(server: RedisServer) -> None:
    other_space, other_group = BlockName(b"m" * 32, 0, name(0).block_hash), BlockName(b"n" * 32, 1, name(0).block_hash)
    async with opened(server.url) as tier:
        client = server.client()
        await tier.store(sends(BLOCKS), 5)
        good = values(client, tier)
        for shift in range(1, len(BLOCKS)):
            for n in BLOCKS:
                client.set(tier.key_of(name(n)), good[(n + shift) % len(BLOCKS)])
            assert await tier.fetch(fetches(BLOCKS), 5) == ["another block"] * len(BLOCKS)
        for foreign in (other_space, other_group):
            client.set(tier.key_of(foreign), good[0])
            (job,) = fetches(range(1))
            assert await tier.fetch([type(job)(foreign, job.into)], 5) == ["another block"]


@pytest.mark.parametrize("width", [16, 32])
async def test_a_reader_cannot_find_a_prompt_that_he_guesses(server: RedisServer, width: int) -> None:
    """Fault L4: he knows how namespaces and hashes are made, and so those of the prompt, but not the secret."""
    parent, guessed = BlockName(b"N" * 32, 3, b"P" * width), BlockName(b"N" * 32, 3, b"G" * width)
    (job,) = sends(range(1))
    async with opened(server.url) as tier:
        assert await tier.store([type(job)(guessed, parent.block_hash, job.payload, 2)], 5) == [None]
        client = server.client()
        stored = {bytes(key): client.get(key) for key in client.scan_iter()}
        assert len(stored) == 2  # and a mark, which stands for no block
        for key, data in stored.items():
            for known in (guessed.namespace, guessed.block_hash, parent.block_hash, Secret().name_of(guessed)):
                for at in range(0, len(known), 8):
                    assert known[at : at + 8] not in key + data[:HEADER]
        # Two values of one namespace have nothing in common by which they could be told to be of one.
        await tier.store([type(job)(parent, b"", job.payload, 2)], 5)
        one, two = (client.get(tier.key_of(which))[24:120] for which in (guessed, parent))
        assert sum(a == b for a, b in zip(one, two, strict=True)) < 16
    # Whose names are not keyed tells whoever can guess: the reason for the secret.
    async with opened(server.url, Secret()) as tier:
        await tier.store([type(job)(guessed, b"", job.payload, 2)], 5)
        assert client.exists(b"kvcascade:b:" + Secret().name_of(guessed))


async def test_a_small_value_that_was_made_huge_is_absent_and_costs_no_memory(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        client = server.client()
        await tier.write([(b"a", b"1"), (b"c", b"3")], 60, 5)
        client.set(b"kvcascade:b", bytes(8 << 20))
        assert await tier.read([b"a", b"b", b"c"], 5) == [b"1", None, b"3"]
        assert tier.available


async def test_many_small_values_that_were_made_long_cost_no_memory(server: RedisServer) -> None:
    keys = [b"d:%d" % number for number in range(3000)]
    async with opened(server.url, deadline="30s") as tier:
        await tier.write([(key, b"16 bytes of ours") for key in keys], 600, 30)
        assert await tier.read(keys, 30, most=16) == [b"16 bytes of ours"] * len(keys)
        client = server.client()
        for key in keys[:500]:
            client.set(b"kvcascade:" + key, bytes(60 << 10))
        tracemalloc.start()
        told = await tier.read(keys, 30, most=16)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert told == [None] * 500 + [b"16 bytes of ours"] * 2500
        assert peak < 8 << 20  # of 29 MiB that came
        assert tier.available


async def test_the_blocks_of_another_fleet_are_as_if_never_stored(server: RedisServer) -> None:
    async with opened(server.url) as ours, opened(server.url, Secret(b"of another tenant, quite")) as theirs:
        await ours.store(sends(BLOCKS), 5)
        never = [BlockName(b"z" * 32, 0, b"z" * 32)]
        assert await theirs.present([name(n) for n in BLOCKS], 5) == await theirs.present(never, 5) == 0
        assert await theirs.fetch(fetches(BLOCKS), 5) == ["not there"] * len(BLOCKS)


async def test_a_clock_that_jumps_strikes_nobody_off(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(server.url) as tier:
        assert await tier.enlist(b"roll", b"one", 3600, 5) == [b"one"]
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 86400)
        assert sorted(await tier.enlist(b"roll", b"two", 3600, 5)) == [b"one", b"two"]
        await tier.store(sends(BLOCKS), 5)
        assert await tier.present([name(n) for n in BLOCKS], 5) == len(BLOCKS)
