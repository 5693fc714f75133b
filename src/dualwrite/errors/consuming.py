"""Messages that could not be processed, and positions from which a consumer can't continue."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError


class MessageFailedError(DualWriteError):
    """A message could not be processed in any attempt; the position was not moved past it. The `__cause__` says why.

    Attributes: `topic`, `partition`, `offset`, `attempts`.
    """

    topic: str
    partition: int
    offset: int
    attempts: int


class MessagesDeletedError(DualWriteError):
    """Retention has deleted messages before they were read. Nothing was changed.

    Attributes: `topic`, `partition`, `position`, `first_offset`.
    """

    topic: str
    partition: int
    position: int
    first_offset: int


class LogTruncatedError(DualWriteError):
    """A partition ends before the position: the brokers have lost messages that were read. Nothing was changed.

    Or it was truncated before the position and has grown again since; a restart does not notice that.

    Attributes: `topic`, `partition`, `position`, and `end_offset`, the end without open transactions.
    """

    topic: str
    partition: int
    position: int
    end_offset: int


class PositionForgottenError(DualWriteError):
    """The position of a partition was removed while the partition was read. Attributes: `topic`, `partition`, `position`."""

    topic: str
    partition: int
    position: int


class TopicReplacedError(DualWriteError):
    """A topic was deleted and created again since it was read: the positions refer to the old topic. Attributes: `topic`."""

    topic: str
