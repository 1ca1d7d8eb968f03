"""What other nodes are told of a prefix that is still being stored here: on a real cache."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from engines.node import Node

from kvcascade.config.settings import Endpoint
from kvcascade.daemon.cluster import OURS
from kvcascade.daemon.granting import Granting
from kvcascade.daemon.index import Index
from kvcascade.daemon.transfer import Transfer
from kvcascade.tiers.remote import Secret

CHAIN = tuple(range(40))


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.expect_sound()
    node.close()


def granting(node: Node, transfer: Transfer | None = None) -> Granting:
    """Without a transfer nothing may be granted."""
    return Granting(node.settings, node.cache, cast(Transfer, transfer), Secret(), boot=b"a" * 16, clock=time.monotonic)


async def test_who_waits_for_a_long_prompt_looks_at_one_block_at_a_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many wait at once: 32 of them that looked at 2000 blocks each held up this node's own hits for 110 ms."""
    engine = node.engine()
    reserved = engine.reserve(CHAIN)
    hashes = engine.hashes(CHAIN)
    looked: asyncio.Queue[int] = asyncio.Queue()
    find = Index.find

    def counted(index: Index, space: int, keys: Any) -> Any:
        looked.put_nowait(len(keys))
        return find(index, space, keys)

    monkeypatch.setattr(Index, "find", counted)
    waiting = asyncio.create_task(
        granting(node).leading(engine.space.fingerprint, engine.space.group, hashes, wait=30.0)
    )
    first, *later = [await looked.get() for _ in range(20)]
    assert first == 40 and set(later) == {1}
    engine.commit(reserved.lease, list(range(25)))
    while await looked.get() == 1:
        pass
    assert {await looked.get() for _ in range(5)} == {1} and not waiting.done()
    engine.commit(reserved.lease, list(range(25, 40)))
    assert await waiting == 40


async def test_a_prefix_whose_storing_is_given_up_is_waited_for_no_longer(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(CHAIN)
    hashes = engine.hashes(CHAIN)
    waiting = asyncio.create_task(
        granting(node).leading(engine.space.fingerprint, engine.space.group, hashes, wait=600.0)
    )
    await asyncio.sleep(0.05)
    engine.commit(reserved.lease, list(range(10)))
    engine.abort(reserved.lease, list(range(10, 40)))
    assert await waiting == 10


@pytest.mark.parametrize(
    ("asked", "chained"),
    [([0, 1, 2, 3], 4), ([3, 4, 5], 3), ([7, 6, 5, 4], 1), ([2, 2, 2], 1), ([0, 1, 5, 6], 2), ([], 0)],
)
async def test_a_chain_is_taken_for_one_as_far_as_it_is_one(node: Node, asked: list[int], chained: int) -> None:
    """Another node may ask for anything: stamps, by which blocks are evicted, and pins keep the chain's true order."""
    engine = node.engine()
    path = tuple(range(8))
    reserved = engine.reserve(path)
    engine.commit(reserved.lease, range(8))
    own = engine.hashes(path)
    hashes = b"".join(own[number * 32 : (number + 1) * 32] for number in asked)
    count = await granting(node).leading(engine.space.fingerprint, engine.space.group, hashes, wait=0.0)
    assert count == chained
    assert node.cache.check() == []
    keys = node.residency.keys(engine.space, hashes)
    lease = node.cache.hold(engine.attachment, engine.space, keys, 60.0)
    assert len(lease.rows) == chained
    assert node.cache.check() == []
    engine.release(lease.number)
    assert not node.residency.index.pins.any()


async def test_what_is_kept_for_other_nodes_is_no_engine_of_this_one(node: Node) -> None:
    """The namespaces that a node tells of are those of its engines."""
    engine = node.engine()
    reserved = engine.reserve(CHAIN[:4])
    engine.commit(reserved.lease, range(4))
    async with Transfer(node.residency) as transfer:
        here = granting(node, transfer)
        hashes = engine.hashes(CHAIN[:4])
        here.hand_off(engine.space, hashes, 60.0, Endpoint("127.0.0.1", 7400), "n")
        grant = await here.grant(engine.space.fingerprint, engine.space.group, hashes)
        assert grant is not None
        own = [one.engine for one in node.cache.attachments.values() if one is not engine.attachment]
        assert sorted(own) == ["hand-offs", "peers"] and OURS.issuperset(own)
        here.release(grant, sent=True)


@pytest.mark.parametrize("lacking", [0, 3])
async def test_a_hand_off_is_kept_until_all_that_its_taker_lacks_was_sent(node: Node, lacking: int) -> None:
    """Parts of it go over several connections, and the last one may be there first; the taker may have some already."""
    engine = node.engine()
    path = tuple(range(8))
    reserved = engine.reserve(path)
    engine.commit(reserved.lease, range(8))
    hashes, space = engine.hashes(path), engine.space
    async with Transfer(node.residency) as transfer:
        here = granting(node, transfer)

        async def send(first: int, end: int, *, sent: bool = True) -> int:
            grant = await here.grant(space.fingerprint, space.group, hashes[first * 32 : end * 32])
            assert grant is not None and len(grant.blocks) == end - first
            here.release(grant, sent=sent)
            return here.status()["handoffs"]

        here.hand_off(space, hashes, 60.0, Endpoint("127.0.0.1", 7400), "n")
        assert here.status() == {"handoffs": 1, "handoff_blocks": 8}
        assert await here.leading(space.fingerprint, space.group, hashes[lacking * 32 :], wait=1.0) == 8 - lacking
        assert await send(7, 8) == 1
        # Who asks without a ticket may lack less.
        assert await here.leading(space.fingerprint, space.group, hashes[7 * 32 :], wait=0.0) == 1
        assert await send(6, 8) == 1
        assert await send(lacking, 6, sent=False) == 1
        assert await send(lacking, 5) == 1
        assert await send(5, 6) == 0
    assert not node.residency.index.pins.any()
