"""Raises KeyboardInterrupt at a chosen place of the code that the main thread runs, as a SIGINT could.

Python looks for signals when a function begins or has returned, and when a loop jumps back. Each time that this happens while
`call` runs is one *place*; they are numbered from 1 in the order in which they are reached.
"""

from __future__ import annotations

import gc
import opcode
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

_LOOKS: Final = frozenset(
    opcode.opmap[name]
    for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")
    if name in opcode.opmap  # they differ from version to version
)
_Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


@dataclass
class Interruption:
    """One run of `call`.

    Args:
        at: The number of the place; 0 to count places only.

    Attributes:
        places: How many places were reached.
        where: File, line and function of the interrupt; empty if the place was not reached.
        is_raised: Whether `call` has raised the interrupt; it may have swallowed it, as a destructor does.
    """

    at: int = 0
    places: int = 0
    where: str = ""
    is_raised: bool = False

    def run(self, call: Callable[[], object]) -> Interruption:
        """Call, and return after the interrupt or at the end. Nothing refers any more to the traceback and to what is in it."""
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            self.is_raised = True
        finally:
            sys.settrace(previous)
        gc.collect()
        return self

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> _Trace | None:
        if "importlib" in frame.f_code.co_filename:  # a module is imported once, in whichever run comes first
            return None
        frame.f_trace_opcodes = True
        before: int | None = None
        instructions = _instructions(frame.f_code)

        def step(frame: FrameType, event: str, _argument: Any) -> _Trace:
            nonlocal before
            if event == "opcode":
                if before in _LOOKS:
                    self._look(frame)
                before = instructions[frame.f_lasti]
            elif event == "exception":  # the call has not returned
                before = None
            return step

        return step

    def _look(self, frame: FrameType) -> None:
        self.places += 1
        if self.places == self.at:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            raise KeyboardInterrupt(self.where)


_code: dict[CodeType, bytes] = {}


def _instructions(code: CodeType) -> bytes:
    """`co_code` is computed at each access."""
    if (found := _code.get(code)) is None:
        found = _code[code] = code.co_code
    return found
