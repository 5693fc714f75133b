"""The root of the exception tree: what every error carries, how its text is made, and how it is pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar


class DualWriteError(Exception):
    """Base class of every error that dualwrite raises deliberately.

    Attributes: `retriable` (whether the same call may succeed if it is repeated), and `lane` (the id of the lane that
    the error is about, if it is not lane 0).

    Args:
        what: One sentence that says what failed.
        transactional_id: The transactional id concerned, if any.
        cause: The likely cause, if known.
        next_step: What the reader can do now.
        facts: Further facts; each becomes an attribute of the error. The class declares the possible ones; reading one that
            this error does not have raises AttributeError.
    """

    lane: str

    retriable: ClassVar[bool] = False

    def __init__(
        self,
        what: str,
        *,
        transactional_id: str | None = None,
        cause: str | None = None,
        next_step: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.transactional_id = transactional_id
        self.cause = cause
        self.next_step = next_step
        self.facts = facts

    if not TYPE_CHECKING:  # each class declares its own, so that a type checker finds unknown names

        def __getattr__(self, name: str) -> Any:
            facts = self.__dict__.get("facts", {})
            if name in facts:
                return facts[name]
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        text = self.what
        if self.transactional_id is not None:
            text += f" [transactional id {self.transactional_id!r}]"
        if self.cause:
            text += f" Cause: {self.cause}"
        if self.next_step:
            text += f" Next step: {self.next_step}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        known = {"transactional_id": self.transactional_id, "cause": self.cause, "next_step": self.next_step}
        return _rebuild, (type(self), self.what, {**known, **self.facts})


def _rebuild(kind: type[DualWriteError], what: str, facts: dict[str, Any]) -> DualWriteError:
    return kind(what, **facts)
