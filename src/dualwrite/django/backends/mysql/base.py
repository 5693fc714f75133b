"""`ENGINE = "dualwrite.django.backends.mysql"`."""

from __future__ import annotations

from django.db.backends.mysql import base

from dualwrite.django.backends.joining import JoinsEveryAtomic


class DatabaseWrapper(JoinsEveryAtomic, base.DatabaseWrapper):
    """Django's, whose transactions commit what `dualwrite.django.send` has sent in them."""
