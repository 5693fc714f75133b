"""The choices of one run: drawn from a seed and kept, or played back; 0 is always the choice that adds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random


class Choices:
    """Every decision of a run is one number from here, so the numbers alone repeat it.

    Args:
        seed: What the numbers are drawn from.
        played: Numbers of an earlier run, which are used instead; where they end, every choice is 0.
    """

    def __init__(self, seed: int, played: Sequence[int] | None = None) -> None:
        self._draw = Random(seed).random
        self._played = None if played is None else iter(played)
        self.made: list[int] = []

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        number = int(self._draw() * count) if self._played is None else min(next(self._played, 0), count - 1)
        self.made.append(number)
        return number

    def happens(self, share: float) -> bool:
        """Whether something happens that does so in this share of all cases."""
        number = int(self._draw() < share) if self._played is None else min(next(self._played, 0), 1)
        self.made.append(number)
        return number == 1

    def weighted(self, shares: Sequence[float]) -> int:
        """0, or the number of one of the shares, counted from 1."""
        if self._played is None:
            drawn, number = self._draw(), 0
            for each, share in enumerate(shares, 1):
                if drawn < share:
                    number = each
                    break
                drawn -= share
        else:
            number = min(next(self._played, 0), len(shares))
        self.made.append(number)
        return number


def shrunk(made: Sequence[int], fails: Callable[[list[int]], bool], *, attempts: int = 2000) -> list[int]:
    """Fewer choices other than 0 with which the run still fails, and an earlier end.

    Blocks of choices are set to 0, or left out, from large blocks to single choices, until nothing can be taken away any more,
    or the attempts are used up.
    """
    best, left = _without_zeros(made), attempts
    progress = True
    while progress and left > 0:
        progress, size = False, max(len(best) // 2, 1)
        while size and left > 0:
            at = 0
            while at < len(best) and left > 0:
                block = best[at : at + size]
                for tried in _simpler(best, at, size) if any(block) else ():
                    left -= 1
                    if fails(tried):
                        best, progress = _without_zeros(tried), True
                        break
                else:
                    at += size
            size //= 2
    return best


def _simpler(best: list[int], at: int, size: int) -> Iterable[list[int]]:
    yield best[:at] + best[at + size :]
    yield [*best[:at], *[0] * len(best[at : at + size]), *best[at + size :]]


def _without_zeros(made: Sequence[int]) -> list[int]:
    kept = list(made)
    while kept and kept[-1] == 0:
        kept.pop()
    return kept
