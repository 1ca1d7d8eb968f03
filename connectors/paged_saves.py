"""The saves that a paged engine's scheduler plans: slots are asked for ahead, and blocks go there once they are final.

Rule: a save never holds the engine's blocks (`paged_worker.py`), and never waits for slots: what a step makes final
whose reservation is not answered yet is copied aside within that step, and goes to its slots by the plan of a later
one, whatever has become of the request since.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.attachment import Reservation, Session
from kvcascade.daemon.protocol import BlockState
from kvcascade.tiers.block import KVGroup

from .base import Aside, Request, Step, Transfer, storable_blocks
from .paged_asking import Asker, Errand

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Offer(Errand):
    """Blocks [start, end) of one group's chain for which slots are asked; [start, sent) are in plans already.

    `asides`: the numbers and blocks of what was copied aside, of [start, sent). `ended`: no further block is wanted,
    but those aside still are.
    """

    request_id: str
    group: int
    start: int
    end: int
    session: Session
    sent: int
    reservation: Reservation | None = None
    waited: bool = False
    ended: bool = False
    asides: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Chain:
    """What is saved of one request: `stored` leading blocks of each group were offered, or are there already."""

    request: Request
    stored: list[int]
    restarts: int = 1  # how often it may offer again from a hole


class Saves:
    """The saves of all requests; the scheduling thread's, as `Asker` is."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        asker: Asker,
        *,
        volatile_groups: frozenset[int],
        null_block: int | None,
        lookahead_tokens: int,
    ) -> None:
        """As with `PagedScheduler`."""
        self._groups = groups
        self._asker = asker
        self._volatile = volatile_groups
        self._null_block = null_block
        self._lookahead = lookahead_tokens
        # The scheduling thread's alone.
        self._chains: dict[str, _Chain] = {}
        self._offers: list[_Offer] = []
        self._asides = 0  # made so far: their numbers

    def begin(self, request: Request) -> None:
        """Save what steps make final of a new request, if it writes."""
        self._chains[request.request_id] = _Chain(request, [0] * len(self._groups))

    def update(self, request: Request) -> None:
        """What is known of a request now."""
        if (chain := self._chains.get(request.request_id)) is not None:
            chain.request = request

    def found(self, request_id: str, matched: Sequence[int]) -> None:
        """So many leading blocks of each group need not be saved: the daemon has them."""
        if matched and (chain := self._chains.get(request_id)) is not None:
            chain.stored = [max(stored, there) for stored, there in zip(chain.stored, matched, strict=True)]

    def lost(self, request_id: str, group: int, first: int) -> None:
        """The daemon does not have block `first` of the group after all, nor what follows it."""
        if (chain := self._chains.get(request_id)) is not None:
            chain.stored[group] = min(chain.stored[group], first)

    def expect(self, request_id: str, tokens: int) -> None:
        """The coming step computes as far as that: by the time that it is planned, its slots may be there."""
        chain = self._chains.get(request_id)
        if chain is not None and chain.request.writes and self._asker.may_ask:
            self._offer(chain, tokens + self._lookahead)

    def plan(self, step: Step) -> tuple[list[Transfer], list[Aside], list[tuple[int, Transfer]]]:
        """What the step saves, what is copied aside, and where what was copied aside goes (`StepPlan`)."""
        for request_id, final in step.final_tokens.items():
            self.expect(request_id, final)
        saves: list[Transfer] = []
        asides: list[Aside] = []
        placed: list[tuple[int, Transfer]] = []
        kept: list[_Offer] = []
        for offer in self._offers:
            final_blocks = 0 if offer.ended or offer.abandoned else self._final_blocks(offer, step)
            if final_blocks > offer.sent and not offer.waited and self._is_prompt(offer, step):
                # Much at once, whose copies aside may not fit; the few blocks of those that decode always do.
                offer.waited = True
                self._asker.wait_for(offer)
            if offer.pending:
                self._put_aside(offer, final_blocks, step, asides)
                kept.append(offer)
                continue
            self._place(offer, placed)
            if self._use(offer, final_blocks, step, saves):
                kept.append(offer)
        self._offers = kept
        return saves, asides, placed

    @property
    def pending(self) -> bool:
        """Whether something copied aside waits for its slots. Not for long: a question ends by its deadline."""
        return any(offer.asides for offer in self._offers)

    def preempted(self, request_id: str) -> None:
        """What no plan holds yet is not saved, unless steps make it final again."""
        chain = self._chains.get(request_id)
        for offer in self._offers:
            if offer.request_id == request_id and not offer.abandoned and not offer.ended:
                if chain is not None:
                    chain.stored[offer.group] = min(chain.stored[offer.group], offer.sent)
                if offer.asides:
                    offer.ended = True
                elif self._asker.abandon(offer):
                    self._asker.submit(self._abort, offer, offer.sent)

    def finished(self, request_id: str) -> None:
        """What no plan holds yet is not saved."""
        self._chains.pop(request_id, None)
        self.preempted(request_id)

    def reset(self) -> None:
        """Nothing more is saved of the requests so far: some of their KV may have been computed before."""
        self._chains.clear()
        for offer in self._offers:
            # Their slots go with the session.
            self._asker.abandon(offer)

    # ---- slots are asked for

    def _offer(self, chain: _Chain, tokens: int) -> None:
        """Ask for slots for the blocks with hashes within the first `tokens`, those of coming steps among them."""
        request = chain.request
        for number, group in enumerate(self._groups):
            start = chain.stored[number]
            end = min(tokens // group.block_tokens, len(request.hashes[number]))
            if end > start:
                chain.stored[number] = end
                offer = _Offer(request.request_id, number, start, end, self._asker.session, start)
                self._offers.append(offer)
                self._asker.submit(self._reserve, offer, request)

    def _reserve(self, offer: _Offer, request: Request) -> None:
        """On the asking thread."""
        size = self._groups[offer.group].block_tokens
        tokens = request.token_ids[offer.start * size : offer.end * size]
        began = self._asker.clock()
        try:
            if not offer.abandoned and self._asker.may_ask:
                offer.reservation = offer.session.reserve(
                    b"".join(request.hashes[offer.group][: offer.end]),
                    request=f"{offer.request_id}/{offer.group}"[-128:],
                    group=offer.group,
                    start=offer.start,
                    tokens=np.asarray(tokens, np.uint32) if len(tokens) == (offer.end - offer.start) * size else b"",
                    timeout=self._asker.limits.timeout,
                )
                if refused := int((offer.reservation.states == BlockState.NO_ROOM).sum()):
                    self._asker.count("blocks_refused", refused)
        except CascadeError as error:
            self._asker.failed("nothing is stored", offer.request_id, error)
            self._asker.blame(began)
        except Exception:
            log.exception("nothing is stored request=%s", offer.request_id)
        if self._asker.settle(offer):
            self._abort(offer, offer.sent)

    def _abort(self, offer: _Offer, first: int) -> None:
        """On the asking thread: give up block `first` and later ones. No rank was told of their slots."""
        held = offer.reservation
        unused = held.blocks[held.blocks >= first] if held is not None else ()
        if held is not None and held.lease and len(unused):
            try:
                offer.session.abort(held.lease, unused, timeout=self._asker.limits.timeout)
            except CascadeError as error:
                log.debug("a reservation ends by its deadline reason=%s", error)

    # ---- what a step makes final

    def _final_blocks(self, offer: _Offer, step: Step) -> int:
        """How many leading blocks of the offer's group hold final tokens once the step is done."""
        final = step.final_tokens.get(offer.request_id)
        chain = self._chains.get(offer.request_id)
        if final is None or chain is None:
            return 0
        blocks = storable_blocks(final, 0, self._groups[offer.group].block_tokens).stop
        return blocks - (offer.group in self._volatile and final > chain.request.prompt_tokens)

    def _is_prompt(self, offer: _Offer, step: Step) -> bool:
        return step.final_tokens[offer.request_id] <= self._chains[offer.request_id].request.tokens

    def _put_aside(self, offer: _Offer, final_blocks: int, step: Step, asides: list[Aside]) -> None:
        """Have what the step makes final of an offer that is not answered copied where the engine does not reuse it."""
        final_blocks = min(final_blocks, offer.end)
        if final_blocks <= offer.sent:
            return
        table = step.blocks[offer.request_id][offer.group][:final_blocks]
        end = next((i for i in range(offer.sent, len(table)) if table[i] == self._null_block), len(table))
        # Out of the window already: their bytes are gone, and nothing below them could be found.
        offer.ended = end < final_blocks
        indices, offer.sent = tuple(range(offer.sent, end)), end
        if indices:
            self._asides += 1
            offer.asides.append((self._asides, indices))
            blocks = tuple(table[index] for index in indices)
            asides.append(Aside(self._asides, offer.request_id, offer.group, indices, blocks))

    def _place(self, offer: _Offer, placed: list[tuple[int, Transfer]]) -> None:
        """Say where what was copied aside goes, all of it or none: the answer is there, or is not wanted any more."""
        held = None if offer.abandoned else offer.reservation
        if held is not None and held.hole is not None and held.hole < offer.start:
            held = None
        asides, offer.asides = offer.asides, []
        for number, indices in asides:
            places = np.flatnonzero(np.isin(held.blocks, indices)) if held is not None else np.empty(0, np.int64)
            if held is None:
                self._asker.count("saves_late", len(indices))
            placed.append((number, _save_of(offer, held, places, ())))

    def _use(self, offer: _Offer, final_blocks: int, step: Step, saves: list[Transfer]) -> bool:
        """Make a save of what is final of an answered offer; whether something of it is left for later steps."""
        held = offer.reservation
        if offer.abandoned or held is None:
            return False
        chain = self._chains.get(offer.request_id)
        if offer.ended or chain is None:
            self._asker.submit(self._abort, offer, offer.sent)
            return False
        if held.hole is not None and held.hole < offer.start and chain.restarts:
            # Parents are gone that were matched or stored before; the engine has them all.
            chain.restarts -= 1
            chain.stored[offer.group] = held.hole
            self._asker.submit(self._abort, offer, offer.start)
            return False
        if not len(held.blocks):
            return False
        if final_blocks <= offer.sent:
            return True
        places = np.flatnonzero((held.blocks >= offer.sent) & (held.blocks < final_blocks))
        indices = held.blocks[places].tolist()
        offer.sent = min(final_blocks, offer.end)
        if indices:
            table = step.blocks[offer.request_id][offer.group]
            if indices[-1] >= len(table) or self._null_block in (ids := [table[index] for index in indices]):
                # Out of the window by now: their bytes are gone, and nothing below them could be found.
                self._asker.submit(self._abort, offer, indices[0])
                return False
            saves.append(_save_of(offer, held, places, tuple(ids)))
        return offer.sent < offer.end


def _save_of(
    offer: _Offer, held: Reservation | None, places: npt.NDArray[np.int64], blocks: tuple[int, ...]
) -> Transfer:
    """Some of an offer's slots, by their places in its answer; of no answer: none."""
    if held is None:
        return Transfer(offer.request_id, offer.group, 0, (), (), (), (), ())
    return Transfer(
        offer.request_id,
        offer.group,
        held.lease,
        tuple(held.blocks[places].tolist()),
        blocks,
        tuple(held.pools[places].tolist()),
        tuple(held.pages[places].tolist()),
        tuple(held.generations[places].tolist()),
        boot=held.boot,
    )
