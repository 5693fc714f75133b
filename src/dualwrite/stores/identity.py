"""Which database this is: a random id that is part of Kafka's ids, and the marks that distinguish a copy from its original.

Pure, except for `file_marks`. The id is created with the first generation of a database, and stored there; a copy of the
database has it as well. With it are stored the marks of the database it was created in (a server's own identifier, or a
path and an inode number). A database is used as long as one of its marks is equal: a file may be renamed, or restored from a
backup under its old name. But it may also be a copy under the same path on another machine, so a database of which only some
marks are equal is reported until `dualwrite db keep-store-id` or `new-store-id` says which it is.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dualwrite.errors import StoreCopiedError, StoredStateError
from dualwrite.transactional_id import STORE_ID_LENGTH


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a database stores about itself.

    Args:
        store_id: Its part in the ids that Kafka sees.
        marks: Those of the database in which the id was created, or which was confirmed to keep it; empty if it has none.
    """

    store_id: str
    marks: frozenset[str] = frozenset()

    @classmethod
    def new(cls, marks: frozenset[str]) -> Self:
        """An identity with a new random id."""
        return cls(uuid.uuid4().hex[:STORE_ID_LENGTH], marks)

    def doubt(self, description: str, found: frozenset[str]) -> StoreCopiedError | str | None:
        """Why a database with the marks `found` may not be the one that the id was created in; None: nothing speaks against it.

        Returns:
            The error for another database; a message without a period for one that has only some of the marks.
        """
        if not self.marks or not found or found == self.marks:
            return None
        return _moved(description, self, found) if self.marks & found else _copied(description, self, found)

    def __str__(self) -> str:
        """As it is stored; `parse` reads it."""
        return json.dumps({"store_id": self.store_id, "marks": sorted(self.marks)}, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read what was stored.

        Raises:
            StoredStateError: The text can't be parsed.
        """
        try:
            found = json.loads(text)
            store_id, marks = str(found["store_id"]), frozenset(map(str, found["marks"]))
            if not store_id:
                raise ValueError("an empty id")  # noqa: TRY301  (one error for all of them)
        except (ValueError, TypeError, KeyError) as error:
            raise StoredStateError(
                f"The stored id of the database can't be read: {str(text)[:200]!r}.",
                cause="it was changed manually or by a newer release",
                next_step="nothing was changed; restore it, or upgrade",
                text=str(text),
            ) from error
        return cls(store_id, marks)


def _copied(description: str, identity: StoreIdentity, found: frozenset[str]) -> StoreCopiedError:
    kept, seen = ", ".join(sorted(identity.marks)), ", ".join(sorted(found))
    return StoreCopiedError(
        f"{description} is a copy of another database, or has moved: its id at Kafka, {identity.store_id}, was created at "
        f"{kept}, and this is {seen}. Nothing was changed.",
        cause="a restored backup, a dump, a template or a copied file has the ids of its original: the two would end each "
        "other's Kafka transactions",
        next_step="if the original is still in use, give this one its own id: `dualwrite db new-store-id`. If this is "
        "the original in another place: `dualwrite db keep-store-id`",
        store_id=identity.store_id,
        kept=kept,
        found=seen,
    )


def _moved(description: str, identity: StoreIdentity, found: frozenset[str]) -> str:
    return (
        f"{description} was moved, restored or copied: its id at Kafka, {identity.store_id}, was created at "
        f"{', '.join(sorted(identity.marks))}, and this is {', '.join(sorted(found))}"
    )


def file_marks(path: str | Path) -> frozenset[str]:
    """The marks of a database that is a file or a folder; empty if it does not exist."""
    try:
        number = Path(path).stat().st_ino
    except OSError:
        return frozenset()
    return frozenset({f"path {Path(path).resolve()}", *([f"inode {number}"] if number else [])})
