"""What makes a backend of Django's commit messages: with it, every outermost `atomic()` does, also that of ATOMIC_REQUESTS."""

from __future__ import annotations

from django.db import DatabaseError, Error
from django.db.backends.base.base import BaseDatabaseWrapper

from dualwrite.django.units import unit_of


class CommitRefusedError(DatabaseError):
    """The messages of a transaction can't be committed with it; dualwrite's error is the `__cause__`.

    Django rolls back after a DatabaseError only: after another error of a COMMIT it would switch autocommit on, which commits.
    """


class JoinsEveryAtomic(BaseDatabaseWrapper):
    """A mixin for a DatabaseWrapper."""

    dualwrite_joins = True

    def _commit(self) -> None:
        unit = unit_of(self)
        if unit is not None:
            try:
                unit.commit()
            except Error:
                raise
            except Exception as error:
                raise CommitRefusedError(f"{error}") from error
            finally:
                unit.end()
        super()._commit()  # finds no transaction if the messages were committed with it

    def _rollback(self) -> None:
        self._end_unit()
        super()._rollback()

    def close(self) -> None:
        """Close the connection; its messages are forgotten."""
        self._end_unit()
        super().close()

    def _end_unit(self) -> None:
        unit = unit_of(self)
        if unit is not None:
            unit.end()
