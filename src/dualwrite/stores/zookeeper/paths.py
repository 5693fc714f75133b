"""From a transactional id to the name of its node and back, exactly. No I/O."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from dualwrite.errors import InvalidTransactionalIdError

STATE_ROOT: Final = "/kafka_transaction_state"
"""The parent of all our nodes (KIP-939), below the client's chroot."""

IDENTITY_PATH: Final = "/kafka_transaction_store"
"""The node with the database's id and marks (`StoreIdentity`)."""

LEASE_ROOT: Final = "/kafka_transaction_lease"
"""The parent of the leases, below the chroot."""

# Characters that a path can't contain (ZooKeeper's PathUtils.validatePath, in UTF-16 units), and our own escape character.
_ESCAPED: Final = re.compile("[/%\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
_RELATIVE: Final = frozenset({".", ".."})


def node_name(transactional_id: str) -> str:
    """The name of the node of an id: the id, with characters that a path can't contain percent-encoded as UTF-8.

    Raises:
        InvalidTransactionalIdError: The id is empty, or can't be encoded in UTF-8.
    """
    if not transactional_id:
        raise InvalidTransactionalIdError("The transactional id is empty.")
    if transactional_id in _RELATIVE:
        return transactional_id.replace(".", "%2E")
    try:
        return _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), transactional_id)
    except UnicodeEncodeError as error:
        raise InvalidTransactionalIdError(
            f"The transactional id {transactional_id!r} can't be encoded in UTF-8.", cause=str(error)
        ) from error


def transactional_id_of(name: str) -> str | None:
    """The id whose node has this name, or None if there is no such id: the node is not ours."""
    try:
        transactional_id = unquote_to_bytes(name).decode()
        return transactional_id if node_name(transactional_id) == name else None
    except (UnicodeError, InvalidTransactionalIdError):
        return None


def state_path(transactional_id: str) -> str:
    """The path of the node of an id, below the chroot."""
    return f"{STATE_ROOT}/{node_name(transactional_id)}"


def lease_path(transactional_id: str) -> str:
    """The path of the lease of an id, below the chroot."""
    return f"{LEASE_ROOT}/{node_name(transactional_id)}"


def is_ours(path: str) -> bool:
    """Whether a normalized path, below the chroot, is one of our roots, a node in one, or the node of the database's id."""
    return path in (STATE_ROOT, LEASE_ROOT, IDENTITY_PATH) or path.startswith((f"{STATE_ROOT}/", f"{LEASE_ROOT}/"))
