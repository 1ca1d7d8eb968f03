"""The scheduler's side of a paged engine's connector, over the daemon: what such engines' plug-ins are thin on top of.

Here is the life of a request: it arrives, is matched, gets blocks, takes part in steps, ends. What is asked about it is
in `paged_lookups.py`, what is loaded for it in `paged_loads.py`, what is saved of it in `paged_saves.py`; each keeps
its own record of the request.

Rule: the scheduler's thread never waits for the daemon but for a small budget a step. Whatever is asked is asked on a
thread of our own (`paged_asking.py`); an answer that is late is used by a later step, or let go of.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.attachment import Session
from kvcascade.daemon.protocol import Tier
from kvcascade.tiers.namespace import Namespace

from .base import NO_MATCH, BlockIds, Match, Report, Request, SchedulerConnector, Step, StepPlan
from .handoff import HandOff
from .paged_asking import Asker, Limits
from .paged_loads import Loads
from .paged_lookups import Lookups
from .paged_saves import Saves

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Life:
    """One request as it was described last.

    `proven`: since it is loaded in the background, the leading tokens whose KV is known to be good; `loaded`: those
    that are once the load has ended. None: what the engine has of it is its own.
    """

    request: Request
    computed: int = 0
    proven: int | None = None
    loaded: int = 0
    giving: Session | None = None  # by which its prompt was handed off


class PagedScheduler(SchedulerConnector):
    """The scheduler's side. `SafeScheduler(..., engine_keeps_loading=True)` goes around it."""

    def __init__(
        self,
        namespace: Namespace,
        open_session: Callable[[str], Session],
        *,
        ranks: int = 1,
        windows: Sequence[int] = (),
        volatile_groups: frozenset[int] = frozenset(),
        null_block: int | None = None,
        lookahead_tokens: int = 2048,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No IO before `attach`.

        Args:
            open_session: makes the scheduler's session for a weights epoch.
            windows: for each KV group how many tokens before the end of a hit its attention sees, 0 where it sees all;
                older blocks are neither held nor brought into memory.
            volatile_groups: KV groups of drafters, whose last block may change while the request decodes.
            null_block: the engine's id for blocks out of a window, which hold nothing.
            lookahead_tokens: for how many tokens after a step slots are asked already, where their hashes are known:
                what one step may compute.
        """
        self._groups = namespace.groups
        self._asker = asker = Asker(open_session, namespace.weights_epoch, limits or Limits(), clock)
        self._lookups = Lookups(
            namespace,
            asker,
            ranks=ranks,
            windows=tuple(windows) or (0,) * len(namespace.groups),
            volatile_groups=volatile_groups,
        )
        self._loads = Loads(namespace.groups, asker, null_block=null_block)
        self._saves = Saves(
            namespace.groups,
            asker,
            volatile_groups=volatile_groups,
            null_block=null_block,
            lookahead_tokens=lookahead_tokens,
        )
        # The scheduling thread's alone.
        self._lives: dict[str, _Life] = {}
        self._hands_off: set[str] = set()  # requests whose hand-off is to be asked for
        self._dropped: set[str] = set()

    # ---- for the plug-in

    def attach(self, timeout: float = 5.0) -> tuple[str, ...]:
        """Attach now; the daemon's warnings. Raises DaemonUnavailable, Refused, ProtocolError."""
        return self._asker.attach(timeout)

    def count(self, name: str) -> None:
        """Add to a sum of the plug-in's own."""
        self._asker.count(name)

    def take_counters(self) -> dict[str, int]:
        """The sums since the last call."""
        return self._asker.take_counters()

    @property
    def saves_pending(self) -> bool:
        """Whether something copied aside waits for its slots, so that further steps should be planned, empty ones too.

        Not for long: a question without an answer ends by its deadline.
        """
        return self._saves.pending

    def sources(self, request_id: str, tokens: int) -> dict[int, int]:
        """By the tier that they were in when they were looked up, the last `tokens` of those that were matched."""
        return self._lookups.sources(request_id, tokens)

    @property
    def namespace(self) -> bytes:
        """The fingerprint of what blocks are kept under; empty while that is not known."""
        info = self._asker.info
        return info.namespace if info is not None else b""

    def handed_off(self, request_id: str) -> HandOff | None:
        """What another engine needs of a prompt that was computed, to be asked before `finished`; waits for nothing.

        None where nothing was handed off, or the daemon has gone away since, or serves no other node.
        """
        life, info = self._lives.get(request_id), self._asker.info
        if life is None or life.giving is not self._asker.session or info is None or not info.ticket:
            return None
        blocks = self._prompt_blocks(life.request, 0)
        self._asker.count("handoffs_given")
        tokens = blocks * self._groups[0].block_tokens
        return HandOff(info.ticket, info.namespace, tokens, life.request.hashes[0][blocks - 1])

    # ---- SchedulerConnector

    def arrived(self, request: Request) -> None:
        self._begin(request)
        if request.hands_off:
            self._hands_off.add(request.request_id)
        self._lookups.arrived(request)

    def match(self, request: Request, computed_tokens: int) -> Match:
        request_id = request.request_id
        life = self._lives.get(request_id) or self._begin(request)
        life.request, life.computed = request, computed_tokens
        self._saves.update(request)
        if self._loads.under_way(request_id):
            self._lookups.let_go(request_id)
            return NO_MATCH
        life.proven = None
        match, there = self._lookups.match(request, computed_tokens)
        self._saves.found(request_id, there)
        return match

    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        request_id = request.request_id
        life = self._lives.get(request_id)
        if life is not None and not (tokens and background):
            # It is computed in the next step.
            life.request = request
            self._saves.update(request)
            self._saves.expect(request_id, life.computed + tokens)
        if not tokens:
            self._lookups.let_go(request_id)
            return
        if life is None:
            raise ValueError(f"{tokens} tokens for request {request_id!r}, for which none were matched")
        found = self._lookups.take(request_id)
        if request.ticket:
            self._asker.count("handoffs_taken")
        if background:
            life.proven, life.loaded = life.computed, life.computed + tokens
        # What was matched may have been let go of since: vLLM allocates late for steps that it plans ahead.
        self._loads.begin(request, found, blocks, life.computed, tokens, background=background)
        if found is None:
            return
        for tier, count in self.sources(request_id, tokens).items():
            self._asker.count(f"hit_tokens_{_tier_name(tier)}", count)

    def plan_step(self, step: Step) -> StepPlan:
        self._prove(step)
        for request_id in step.preempted:
            self._lookups.let_go(request_id)
            self._saves.preempted(request_id)
        loads, failed = self._loads.plan()
        saves, asides, placed = self._saves.plan(step)
        self._begin_handoffs(step)
        dropped, self._dropped = frozenset(self._dropped), set()
        self._asker.begin_step()
        self._lookups.begin_step()
        info = self._asker.info
        return StepPlan(
            loads=tuple(loads),
            saves=tuple(saves),
            asides=tuple(asides),
            placed=tuple(placed),
            failed=tuple(failed),
            dropped=dropped,
            attachment=info.attachment if info is not None else b"",
            weights_epoch=self._asker.epoch,
            seen_failures=self._loads.seen_failures,
            # A load within the step is waited for by the engine, and is no computing.
            prefill=step.prefill if all(load.background for load in loads) else None,
        )

    def finished(self, request_id: str, blocks: BlockIds, final_tokens: int) -> bool:
        self._lives.pop(request_id, None)
        self._hands_off.discard(request_id)
        self._lookups.finished(request_id)
        self._saves.finished(request_id)
        if not self._loads.finished(request_id):
            self._dropped.add(request_id)
        return False

    def completed(self, report: Report) -> None:
        for request_id, blocks in self._loads.completed(report).items():
            self._lookups.give_up(request_id)
            life = self._lives.get(request_id)
            for group, first in blocks.items():
                self._saves.lost(request_id, group, first)
                if life is not None:
                    life.loaded = min(life.loaded, first * self._groups[group].block_tokens)
        for request_id in report.received:
            if (life := self._lives.get(request_id)) is not None and life.proven is not None:
                life.proven = life.loaded

    def reset(self) -> bool:
        """From now on blocks go to, and come from, a private namespace: nobody has named the new weights.

        False while a load is under way that was begun before: its request will hold KV of the old weights.
        """
        self._hands_off.clear()
        self._lookups.reset()
        self._saves.reset()
        alone = self._loads.reset()
        self._asker.renew(f"private-{secrets.token_hex(16)}")
        return alone

    def close(self) -> None:
        self._asker.close()

    def _begin(self, request: Request) -> _Life:
        life = self._lives[request.request_id] = _Life(request)
        self._saves.begin(request)
        return life

    def _prove(self, step: Step) -> None:
        """An engine that goes on with a load that failed, or has not ended, would have garbage stored as its tokens.

        Also of other requests that find it in the engine's own cache: nothing more that it computes can be relied on.
        """
        for request_id, computed in step.computed_tokens.items():
            life = self._lives.get(request_id)
            if life is None or life.proven is None:
                continue
            if computed > life.proven:
                raise ValueError(
                    f"request {request_id!r} goes on from {computed} tokens, of which {life.proven} are good: the "
                    "engine has not understood that a load failed"
                )
            life.proven = None

    # ---- hand-offs

    def _prompt_blocks(self, request: Request, group: int) -> int:
        return min(request.prompt_tokens // self._groups[group].block_tokens, len(request.hashes[group]))

    def _begin_handoffs(self, step: Step) -> None:
        """Have prompts kept whose end this step computes: behind the questions for their slots, on one thread with
        them, so that the daemon knows which blocks it is about."""
        for request_id in sorted(self._hands_off):
            life, final = self._lives[request_id], step.final_tokens.get(request_id, 0)
            if not final or final < life.request.prompt_tokens:
                continue
            self._hands_off.discard(request_id)
            if self._prompt_blocks(life.request, 0) and self._asker.may_ask:
                life.giving = self._asker.session
                self._asker.submit(self._hand_off, life.giving, life.request)

    def _hand_off(self, session: Session, request: Request) -> None:
        """On the asking thread."""
        limits = self._asker.limits
        began = self._asker.clock()
        try:
            for group in range(len(self._groups)):
                hashes = b"".join(request.hashes[group][: self._prompt_blocks(request, group)])
                keep = max(1, int(limits.handoff_keep * 1000))
                session.hand_off(hashes, group=group, keep_ms=keep, timeout=limits.timeout)
        except CascadeError as error:
            self._asker.failed("nothing is handed off", request.request_id, error)
            self._asker.blame(began)
        except Exception:
            log.exception("a prompt that is handed off is not kept request=%s", request.request_id)


def _tier_name(tier: int) -> str:
    try:
        return Tier(tier).name.lower()
    except ValueError:
        return "other"
