"""Fixtures of the store tests."""

from __future__ import annotations

import pytest
from store_scene import ID, user_metadata

from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT


@pytest.fixture
def claim(store: SqlStateStore) -> Claim:
    """The first claim of the id, in a database that has the user's tables too."""
    user_metadata.create_all(store.engine)
    return store.claim(ID, "tests", timeout=LIMIT)
