"""The identity of a database: its stored form, and distinguishing a copy from its original."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualwrite.errors import StoreCopiedError, StoredStateError
from dualwrite.stores.identity import StoreIdentity, file_marks
from fixtures.tables import table

HERE = frozenset({"path /a", "inode 1"})


def test_an_identity_survives_a_round_trip() -> None:
    identity = StoreIdentity.new(HERE)
    assert StoreIdentity.parse(str(identity)) == identity
    assert StoreIdentity.parse(str(identity).encode()) == identity


def test_each_identity_has_its_own_random_id() -> None:
    ids = {StoreIdentity.new(HERE).store_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 12 and set(each) <= set("0123456789abcdef") for each in ids)


def test_an_invalid_identity_is_an_error() -> None:
    for text in ("", "{}", "[]", '{"store_id": "", "marks": []}', '{"store_id": "a"}', '{"store_id": "a", "marks": 1}'):
        with pytest.raises(StoredStateError, match="restore it"):
            StoreIdentity.parse(text)


@table(
    ("kept", "found", "doubt"),
    [
        (HERE, HERE, type(None)),
        (HERE, frozenset({"path /b", "inode 1"}), str),
        (HERE, frozenset({"path /a", "inode 2"}), str),
        (HERE, frozenset({"path /b", "inode 2"}), StoreCopiedError),
        (HERE, frozenset(), type(None)),
        (frozenset(), HERE, type(None)),
    ],
)
def test_a_store_is_a_copy_if_no_mark_is_equal(kept: frozenset[str], found: frozenset[str], doubt: type[object]) -> None:
    assert isinstance(StoreIdentity("a", kept).doubt("db", found), doubt)


def test_a_file_is_identified_by_path_and_inode(tmp_path: Path) -> None:
    first, copy, link = tmp_path / "first", tmp_path / "copy", tmp_path / "link"
    first.write_text("x")
    copy.write_text("x")
    link.symlink_to(first)
    assert file_marks(link) == file_marks(first)
    assert not file_marks(copy) & file_marks(first)
    before = file_marks(first)
    assert file_marks(first.rename(tmp_path / "renamed")) & before
    assert file_marks(tmp_path / "nothing") == frozenset()
