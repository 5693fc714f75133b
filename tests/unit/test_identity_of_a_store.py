"""The identity of a database: its stored form, and distinguishing a copy from its original."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualwrite.errors import StoredStateError
from dualwrite.stores.identity import StoreIdentity, file_marks

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


def test_one_equal_mark_is_enough() -> None:
    kept = StoreIdentity("a", HERE)
    assert not kept.is_elsewhere(HERE)
    assert not kept.is_elsewhere(frozenset({"path /b", "inode 1"}))
    assert not kept.is_elsewhere(frozenset({"path /a", "inode 2"}))
    assert kept.is_elsewhere(frozenset({"path /b", "inode 2"}))


def test_a_store_matches_partly_if_only_some_marks_are_equal() -> None:
    kept = StoreIdentity("a", HERE)
    assert kept.matches_partly(frozenset({"path /b", "inode 1"}))
    assert kept.matches_partly(frozenset({"path /a", "inode 2"}))
    for other in (HERE, frozenset({"path /b", "inode 2"}), frozenset[str]()):
        assert not kept.matches_partly(other)


def test_without_marks_no_store_is_elsewhere() -> None:
    assert not StoreIdentity("a", HERE).is_elsewhere(frozenset())
    assert not StoreIdentity("a").is_elsewhere(HERE)


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
