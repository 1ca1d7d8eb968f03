"""The book of running copies: each result is told once, while it is waited for."""

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.connectors.base import FailedLoad, Report, Transfer
from kvcascade.connectors.transfer_book import Copy, TransferBook

NO_LEASE = 0
SOON = 10.0  # seconds that nothing here takes unless it hangs
EVENTS = ["load", "save", "end", "end badly", "keep", "drop", "preempt", "take"]


def transfer(request_id: str, *blocks: int, background: bool = True) -> Transfer:
    zeros = (0,) * len(blocks)
    return Transfer(request_id, 0, NO_LEASE, zeros, blocks, zeros, zeros, zeros, background)


def test_a_load_is_reported_once_when_its_last_copy_ends() -> None:
    book = TransferBook()
    first, second = (book.begin(transfer("a", n), load=True) for n in (1, 2))
    assert book.take() == Report()
    assert book.end(first)
    assert book.take() == Report()
    assert book.end(second)
    assert book.take() == Report(received=frozenset({"a"}))
    assert book.take() == Report()


def test_what_failed_comes_with_the_request_however_long_before_its_copy_ended() -> None:
    # Fault A10: an engine that takes failures by request compares them with what the same report names as received.
    book = TransferBook()
    first, second = (book.begin(transfer("a", n, n + 1), load=True) for n in (1, 5))
    book.end(first, failed_blocks=[2])
    book.fail(FailedLoad("a", 1, (9,), background=True))
    assert book.take() == Report()
    book.end(second)
    last = book.take()
    assert last.failed_blocks == {2, 9}
    assert last.failed_requests == last.received == {"a"}
    assert book.take() == Report()


def test_failures_that_were_not_told_go_with_a_request_that_is_dropped_or_preempted() -> None:
    book = TransferBook()
    for request_id in ("a", "b"):
        first, _ = (book.begin(transfer(request_id, n), load=True) for n in (1, 2))
        book.end(first, failed_blocks=[1])
    book.drop("a")
    book.preempt(["b"], timeout=0)
    for request_id in ("a", "b"):
        book.end(book.begin(transfer(request_id, 3), load=True))
    assert book.take() == Report(received=frozenset({"a", "b"}))


def test_a_load_within_the_step_tells_of_failures_alone() -> None:
    book = TransferBook()
    good = book.begin(transfer("a", 1, background=False), load=True)
    bad = book.begin(transfer("b", 2, background=False), load=True)
    book.end(good)
    book.end(bad, failed_blocks=[2])
    assert book.take() == Report(failed=(FailedLoad("b", 0, (2,), background=False),))


def test_a_promised_load_that_never_began_is_a_failed_one() -> None:
    book = TransferBook()
    book.fail(FailedLoad("a", 0, (3, 4), background=True))
    report = book.take()
    assert report.failed_blocks == {3, 4} and report.received == {"a"}
    assert book.take() == Report()


def test_a_save_is_reported_only_to_an_engine_that_waits_for_it() -> None:
    book = TransferBook()
    book.end(book.begin(transfer("a", 1), load=False))
    assert book.take() == Report()
    running = book.begin(transfer("a", 2), load=False)
    book.keep("a")
    assert book.take() == Report()
    book.end(running)
    assert book.take() == Report(sent=frozenset({"a"}))
    assert book.take() == Report()
    book.keep("b")  # whose saves have all ended before
    assert book.take() == Report(sent=frozenset({"b"}))


def test_nothing_is_reported_of_a_dropped_request_not_even_when_its_name_comes_again() -> None:
    # Fault E1.
    book = TransferBook()
    old = book.begin(transfer("a", 1), load=True)
    done = book.begin(transfer("b", 2), load=True)
    book.end(done, failed_blocks=[2])
    for request_id in ("a", "b", "never seen"):
        book.drop(request_id)
    assert book.take() == Report()
    assert book.busy("a") and not book.busy("b")
    new = book.begin(transfer("a", 7), load=True)
    assert not book.end(old, failed_blocks=[1])
    assert book.take() == Report()
    assert book.end(new)
    assert book.take() == Report(received=frozenset({"a"}))


def test_a_preempted_requests_copies_end_before_its_blocks_are_reused() -> None:
    book = TransferBook()
    ended = book.begin(transfer("a", 1), load=False)
    started = threading.Event()
    results = []

    def copy() -> None:
        started.set()
        results.append(book.end(ended))

    thread = threading.Thread(target=copy)
    thread.start()
    assert started.wait(SOON)
    assert book.preempt({"a"}, timeout=SOON) == frozenset()
    thread.join(SOON)
    assert results == [True]  # read in time, so it may be committed


def test_a_copy_that_outlasts_a_preemption_is_given_up() -> None:
    book = TransferBook()
    stuck = book.begin(transfer("a", 1), load=False)
    other = book.begin(transfer("b", 2), load=False)
    assert book.preempt({"a"}, timeout=0) == {"a"}
    assert not book.wait_ended({"a"}, timeout=0)
    book.keep("a")
    assert book.take() == Report()  # it still reads the blocks
    assert not book.end(stuck)
    assert book.wait_ended({"a"}, timeout=0)
    assert book.take() == Report(sent=frozenset({"a"}))
    assert book.end(other)


def test_after_close_nothing_counts() -> None:
    book = TransferBook()
    running = book.begin(transfer("a", 1), load=False)
    assert not book.close(timeout=0)
    late = book.begin(transfer("b", 1), load=True)
    assert late.given_up
    assert not book.end(late, failed_blocks=[1])
    assert not book.end(running)
    assert book.close(timeout=0)
    assert book.take() == Report()


def test_ending_a_copy_twice_is_a_bug() -> None:
    book = TransferBook()
    copy = book.begin(transfer("a", 1), load=True)
    book.end(copy)
    with pytest.raises(ValueError, match="request 'a' had ended before"):
        book.end(copy)


@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)),
        max_size=60,
    )
)
def test_whatever_happens_each_result_is_told_once_and_only_while_awaited(events: list[tuple[str, int]]) -> None:
    # Faults E1 and M1: aborts, preemptions and reused names at every point.
    book = TransferBook()
    running: list[Copy] = []
    awaited: Counter[tuple[str, str]] = Counter()

    def take() -> None:
        report = book.take()
        for kind, told in (("sent", report.sent), ("received", report.received)):
            for request_id in told:
                assert awaited[kind, request_id] == 1, (kind, request_id)
                awaited[kind, request_id] = 0

    for event, number in events:
        request_id = f"request {number}"
        if event in ("load", "save"):
            running.append(book.begin(transfer(request_id, number), load=event == "load"))
            if event == "load":
                awaited["received", request_id] = 1
        elif event in ("end", "end badly") and running:
            copy = running.pop(number % len(running))
            book.end(copy, failed_blocks=copy.transfer.blocks if event == "end badly" else ())
        elif event == "keep":
            book.keep(request_id)
            awaited["sent", request_id] = 1
        elif event == "drop":
            book.drop(request_id)
            awaited["sent", request_id] = awaited["received", request_id] = 0
        elif event == "preempt":
            book.preempt([request_id], timeout=0)
            awaited["sent", request_id] = awaited["received", request_id] = 0
        else:
            take()
    for copy in running:
        book.end(copy)
    take()
    assert not +awaited
    assert book.close(timeout=0)
