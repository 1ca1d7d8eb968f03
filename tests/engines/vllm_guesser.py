"""A drafter for vLLM's speculative decoding, loaded by its name: what followed the last time that a token occurred.

vLLM's own needs numba. Every third draft is made wrong on purpose, so that some are always rejected.
"""

from typing import Any

GUESSES = 3


class Guesser:
    """vLLM's custom proposer."""

    def __init__(self, vllm_config: Any) -> None:
        self._made = 0

    def load_model(self, target: Any) -> None:
        """There is no model."""

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, **more: Any) -> list[list[int]]:
        """For each request the tokens to try next; none for one that drew nothing."""
        return [self._guess(tokens[row, : counts[row]].tolist()) if drawn else [] for row, drawn in enumerate(sampled)]

    def _guess(self, known: list[int]) -> list[int]:
        last = len(known) - 1
        before = next((place for place in range(last - 1, -1, -1) if known[place] == known[last]), None)
        if before is None:
            return []
        guess = known[before + 1 : before + 1 + GUESSES]
        self._made += 1
        if self._made % 3 == 0:
            guess[-1] = (guess[-1] + 1) % 1000
        return guess
