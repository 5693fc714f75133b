"""Ways to break the in-memory store of examples/own_store, each a change of its source: the suite must detect every one.

Each is a mistake that an author of a store could make, and that loses or duplicates something in the model of the promise.
"""

from __future__ import annotations

from typing import Final

Change = tuple[str, str]

_CHECKED_AT_COMMIT = "row = rows.check_fence(self._database.row(self._claim.transactional_id), self._claim)"
_UNCHECKED = "row = self._database.row(self._claim.transactional_id)"
_RESOLVED = "rows.with_resolution(rows.check_fence(row, claim), resolution)"
_RESOLVE = f"lambda row: {_RESOLVED}"
_CLEARS_ALL = "__import__('dataclasses').replace(resolution, clear_state=resolution.clear_state or bool(resolution.clear_only))"
_ACQUIRE = "lambda row: rows.with_generation(rows.check_fence(row, claim), kind, reuse=reuse, **own)"
_ACQUIRE_BLIND = _ACQUIRE.replace(
    "rows.check_fence(row, claim)", "__import__('dataclasses').replace(rows.check_fence(row, claim), lost=())"
)
_FORGET = "lambda row: row and rows.forgotten(row)"
_ACKNOWLEDGE = "lambda row: row and rows.acknowledged(row, only)"
_CLAIM = "row = rows.claimed(before, transactional_id, owner, token=token, expected_fence=expected_fence)\n"
_COMMIT = "self._database.write(self._record(row), self._batch.changes)"
_RECORD = """rows.recorded(
            row, state, generation=generation, transaction_number=transaction_number, delivery=delivery
        )"""
_REPLACE = "__import__('dataclasses').replace"

_A_HIGHER_FENCE = """row = self.read(claim.transactional_id)
        return row if row and row.fence < claim.fence else rows.check_fence(row, claim)"""
_AT_ONCE = """        self.changes[key] = value
        self._database.content = Content(self._database.content.rows, {**self._database.content.data, key: value})"""
_READ_EARLY = """        read = rows.check_fence(self._database.row(self._claim.transactional_id), self._claim)
        self._record = lambda row: """
_ROLLBACK = '''        """See StoreTransaction."""
        self._batch.ended = True'''
_REMOVES_DATA = """        kept = {k: v for k, v in self._database.content.data.items() if k not in self._batch.changes}
        self._database.content = Content(self._database.content.rows, kept)
        self._batch.ended = True"""
_ONE_AT_A_TIME = """        with self._database.lock:
            before = self._database.row(transactional_id)"""
_ALL_AT_ONCE = """        if True:
            before = self._database.row(transactional_id)
            __import__('time').sleep(0.001)"""

_BEGINS_SOON = """    def begin_soon(self, claim):
        return InMemoryTransaction(self._database, claim)

    def acknowledge("""
_CHECKED_BEFORE = """self.read_claimed(claim)
        time.sleep(0.001)
        self._change(claim.transactional_id, lambda row: rows.with_resolution(row, resolution))"""

_FREE = "if self._owner(name) in (None, owner) or self._database.leases[name][1] <= now]"
_RENEWED = "ours = [name for name in ids if self._owner(name) == owner]"
_RELEASED = "for name in [name for name in ids if self._owner(name) == owner]:"
_LISTED = "for name, (owner, until) in found if name.startswith(prefix)]"

MUTANTS: Final[dict[str, tuple[Change, ...]]] = {
    # --- the fence ---
    "commit does not check the fence": ((_CHECKED_AT_COMMIT, _UNCHECKED),),
    "begin does not check the fence": (
        ("        self.read_claimed(claim)\n        return InMemory", "        return InMemory"),
    ),
    "begin_soon leaves the check to nobody": (("    def acknowledge(", _BEGINS_SOON),),
    "a claim does not raise the fence": (
        (_CLAIM, _CLAIM + f"            row = {_REPLACE}(row, fence=max(1, row.fence - (before is not None)))\n"),
    ),
    "expected_fence is ignored": ((_CLAIM, _CLAIM.replace("expected_fence=expected_fence", "expected_fence=None")),),
    "a conditional claim creates a row": (
        (_CLAIM, _CLAIM.replace("=expected_fence)", "=expected_fence if before else None)")),
    ),
    "recording clears whatever state there is": ((_RESOLVE, _RESOLVE.replace("resolution)", f"{_CLEARS_ALL})")),),
    "recording ignores the fence": ((_RESOLVE, "lambda row: rows.with_resolution(row, resolution)"),),
    "acquire_generation ignores the fence": ((_ACQUIRE, _ACQUIRE.replace("rows.check_fence(row, claim)", "row")),),
    "recording checks the fence before its write": ((f"self._change(claim.transactional_id, {_RESOLVE})", _CHECKED_BEFORE),),
    "acquire_generation checks the fence before its write": (
        ("        own = {", "        self.read_claimed(claim)\n        time.sleep(0.001)\n        own = {"),
        (_ACQUIRE, _ACQUIRE.replace("rows.check_fence(row, claim)", "row")),
    ),
    "read_claimed ignores the fence": (
        ("return rows.check_fence(self.read(claim.transactional_id), claim)", "return self.read(claim.transactional_id)"),
        ("        self.read_claimed(claim)\n", "        rows.check_fence(self.read(claim.transactional_id), claim)\n"),
    ),
    "a fence above the row's is accepted": (
        (
            "return rows.check_fence(self.read(claim.transactional_id), claim)",
            _A_HIGHER_FENCE,
        ),
    ),
    "forget drops the fence": ((_FORGET, f"lambda row: row and {_REPLACE}(rows.forgotten(row), fence=0)"),),
    "forget does not raise the fence": ((_FORGET, f"lambda row: row and {_REPLACE}(rows.forgotten(row), fence=row.fence)"),),
    # --- state and data ---
    "the data is written before the state": (
        (
            _CHECKED_AT_COMMIT,
            "self._database.content = Content(self._database.content.rows, "
            "{**self._database.content.data, **self._batch.changes})\n            " + _CHECKED_AT_COMMIT,
        ),
    ),
    "the data is written at once": (
        (
            "        self.changes[key] = value",
            _AT_ONCE,
        ),
    ),
    "the state is not written": ((_COMMIT, "self._database.write(row, self._batch.changes)"),),
    "the data is not written": ((_COMMIT, "self._database.write(self._record(row))"),),
    "an empty state does not replace one": ((_RECORD, _RECORD.replace("state,", "state or row.prepared_state,")),),
    "the delivery of a state is not stored": ((_RECORD, _RECORD.replace("delivery=delivery", "delivery=None")),),
    "a state without a delivery keeps the earlier one's": (
        (_RECORD, _RECORD.replace("delivery=delivery", "delivery=delivery or row.delivery")),
    ),
    "the delivery outlives its state": (
        (
            _RESOLVE,
            f"lambda row: {_REPLACE}({_RESOLVED}, delivery=row.delivery)",
        ),
    ),
    "the generation of a state is not stored": ((_RECORD, _RECORD.replace("generation=generation", "generation=0")),),
    "recording a state drops the store's id": ((_RECORD, f"{_REPLACE}({_RECORD}, store_id='')"),),
    "record writes the row that it has read": (
        (
            "        self._record = lambda row: ",
            _READ_EARLY,
        ),
        (_RECORD, _RECORD.replace("row, state", "read, state")),
    ),
    "rollback after commit removes the data": (
        (
            _ROLLBACK,
            _REMOVES_DATA,
        ),
    ),
    "the handle accepts writes after the end": (
        ("        self.check_open()\n        self.changes[key]", "        self.changes[key]"),
    ),
    "a transaction can be committed twice": (("        self._batch.ended = True\n        with", "        with"),),
    # --- claims ---
    "transaction_number is kept at a claim": (
        (
            _CLAIM,
            _CLAIM + f"            row = {_REPLACE}(row, transaction_number=before.transaction_number if before else 0)\n",
        ),
    ),
    "a conditional claim resets transaction_number": (
        (_CLAIM, _CLAIM + f"            row = {_REPLACE}(row, transaction_number=0)\n"),
    ),
    "a claim clears the state": ((_CLAIM, _CLAIM + f"            row = {_REPLACE}(row, prepared_state=None)\n"),),
    "a claim drops the delivery": ((_CLAIM, _CLAIM + f"            row = {_REPLACE}(row, delivery=None)\n"),),
    "a claim drops the store's id": ((_CLAIM, _CLAIM + f"            row = {_REPLACE}(row, store_id='')\n"),),
    "a claim does not revive a tombstone": (
        (_CLAIM, _CLAIM + f"            row = {_REPLACE}(row, forgotten=bool(before and before.forgotten))\n"),
    ),
    "claims have the same token": (("token or rows.new_token()", '"token"'),),
    "a claim does not keep the caller's token": (("token or rows.new_token()", "rows.new_token()"),),
    "a long owner is not truncated": (("owner[:MAX_OWNER_LENGTH]", "owner"),),
    "claims are not made one at a time": (
        ("        if not self._database.lock.acquire(timeout=timeout):", "        if timeout < 0:"),
        ("            self._database.lock.release()", "            pass"),
        ("            token = token", "            __import__('time').sleep(0.001)\n            token = token"),
    ),
    "changes are not made one at a time": (
        (
            _ONE_AT_A_TIME,
            _ALL_AT_ONCE,
        ),
    ),
    # --- recovery ---
    "a generation is reused for another kind": (
        (
            _ACQUIRE,
            _ACQUIRE.replace("rows.check_fence(row, claim)", f"{_REPLACE}(rows.check_fence(row, claim), generation_kind=kind)"),
        ),
    ),
    "each generation has another store id": (
        (_ACQUIRE, _ACQUIRE.replace("**own", "**{**own, 'store_id': __import__('uuid').uuid4().hex[:12]}")),
    ),
    "the expected identity is ignored": (("            if self._database.identity != expected:", "            if False:"),),
    "each store has an id of its own": (
        ("return self._database.identity\n", "return self.__dict__.get('own')\n"),
        ("            self._database.identity = identity\n", "            self.own = self._database.identity = identity\n"),
        ("if self._database.identity != expected", "if self.__dict__.get('own') != expected"),
    ),
    "lost entries can't be cleared": (
        (_RESOLVE, _RESOLVE.replace("resolution)", f"{_REPLACE}(resolution, clear_lost=False))")),
    ),
    "the cluster is not stored": ((_ACQUIRE, _ACQUIRE.replace("**own", "**{**own, 'cluster_id': ''}")),),
    "another cluster is accepted": (
        (
            _ACQUIRE,
            _ACQUIRE.replace("rows.check_fence(row, claim)", f"{_REPLACE}(rows.check_fence(row, claim), cluster_id='')"),
        ),
    ),
    "a transaction that was published again is not recorded": (
        (_RESOLVE, _RESOLVE.replace("resolution)", f"{_REPLACE}(resolution, republished=None))")),
    ),
    "a resolved entry is not removed": (
        (_RESOLVE, _RESOLVE.replace("resolution)", f"{_REPLACE}(resolution, resolved_entry=None))")),
    ),
    "an id can't move to another cluster": (
        (_RESOLVE, _RESOLVE.replace("resolution)", f"{_REPLACE}(resolution, cluster_id=None))")),
    ),
    "a resolution drops the cluster": (
        (_RESOLVE, f"lambda row: {_REPLACE}({_RESOLVE.removeprefix('lambda row: ')}, cluster_id=resolution.cluster_id or '')"),
    ),
    "a resolution drops the store's id": ((_RESOLVE, f"lambda row: {_REPLACE}({_RESOLVED}, store_id='')"),),
    "acknowledge drops the cluster": (
        (_ACKNOWLEDGE, f"lambda row: row and {_REPLACE}(rows.acknowledged(row, only), cluster_id='')"),
    ),
    "forget drops the store's id": ((_FORGET, f"lambda row: row and {_REPLACE}(rows.forgotten(row), store_id='')"),),
    "a generation with an unverified entry is reused": (
        (_ACQUIRE, f"lambda row: {_REPLACE}({_ACQUIRE_BLIND.removeprefix('lambda row: ')}, lost=row.lost)"),
    ),
    "reuse is ignored": ((_ACQUIRE, _ACQUIRE.replace("reuse=reuse", "reuse=False")),),
    "a reused generation stays resolved": (
        (
            _ACQUIRE,
            f"lambda row: {_REPLACE}({_ACQUIRE.removeprefix('lambda row: ')}, resolved_generation=row.resolved_generation)",
        ),
    ),
    "a resolution always clears the state": (
        (_RESOLVE, f"lambda row: {_REPLACE}({_RESOLVE.removeprefix('lambda row: ')}, prepared_state=None)"),
    ),
    "a resolution replaces the lost entries": (
        (_RESOLVE, f"lambda row: rows.with_resolution({_REPLACE}(rows.check_fence(row, claim), lost=()), resolution)"),
    ),
    "acknowledge clears the state": (
        (_ACKNOWLEDGE, f"lambda row: row and {_REPLACE}(rows.acknowledged(row, only), prepared_state=None)"),
    ),
    "acknowledge keeps the lost entries": ((_ACKNOWLEDGE, "lambda row: row"),),
    "acknowledge returns what another call has removed": (
        (
            "before, after = self._change(transactional_id",
            "before = self.read(transactional_id)\n        time.sleep(0.01)\n        _, after = self._change(transactional_id",
        ),
    ),
    "acknowledge removes entries that nobody has seen": ((_ACKNOWLEDGE, "lambda row: row and rows.acknowledged(row)"),),
    "an unresolved id is forgotten": (
        (_FORGET, f"lambda row: row and {_REPLACE}(row, forgotten=True, fence=row.fence + 1 - row.forgotten)"),
    ),
    "forgetting creates a row": (
        (_FORGET, "lambda row: rows.forgotten(row) if row else rows.claimed(None, transactional_id, '', token='')"),
    ),
    # --- ids ---
    "tombstones are listed": ((" and not row.forgotten)", ")"),),
    "ids are not sorted": (("return sorted(name", "return list(name"),),
    "prefixes are patterns": (("if name.startswith(prefix)", "if __import__('fnmatch').fnmatchcase(name, prefix + '*')"),),
    "ids are compared without case": (
        ("self.content.rows.get(transactional_id)", "self.content.rows.get(transactional_id.casefold())"),
        ("row.transactional_id: document(row)", "row.transactional_id.casefold(): document(row)"),
    ),
    "ids are compared without trailing spaces": (
        ("self.content.rows.get(transactional_id)", "self.content.rows.get(transactional_id.rstrip())"),
        ("row.transactional_id: document(row)", "row.transactional_id.rstrip(): document(row)"),
    ),
    "ids are truncated": (
        ("self.content.rows.get(transactional_id)", "self.content.rows.get(transactional_id[:254])"),
        ("row.transactional_id: document(row)", "row.transactional_id[:254]: document(row)"),
    ),
    # --- leases ---
    "an id is leased twice": ((_FREE, "]"),),
    "leases don't end": ((_FREE, "if self._owner(name) in (None, owner)]"),),
    "an owner can't acquire its own ids again": ((_FREE, _FREE.replace("(None, owner)", "(None,)")),),
    "leases are not acquired one at a time": (
        (
            "        with self._database.lock:\n            now = time.monotonic()\n            free",
            "        if True:\n            now = time.monotonic()\n            free",
        ),
        (_FREE, f"{_FREE}\n            time.sleep(0.001)"),
    ),
    "leases of others are renewed": ((_RENEWED, "ours = [name for name in ids if self._owner(name)]"),),
    "renewing acquires free ids": ((_RENEWED, _RENEWED.replace("== owner", "in (None, owner)")),),
    "a lease that has ended is not renewed": (
        (_RENEWED, _RENEWED.replace("== owner", "== owner and self._database.leases[name][1] > time.monotonic()")),
    ),
    "renewing does not prolong": (
        ("(owner, time.monotonic() + seconds) for name in ours", "self._database.leases[name] for name in ours"),
    ),
    "leases of others are released": ((_RELEASED, "for name in [name for name in ids if self._owner(name)]:"),),
    "a released lease stays": ((_RELEASED, "for name in []:"),),
    "leases that have ended are not listed": ((_LISTED, _LISTED.replace("]", " and until > now]")),),
    "leases of other prefixes are listed": (
        (_LISTED, _LISTED.replace("name.startswith(prefix)", "name.casefold().startswith(prefix.casefold())")),
    ),
    "leases are not sorted": (("sorted(self._database.leases.items())", "list(self._database.leases.items())"),),
    "a long owner can't renew": (
        (
            "        owner = owner[:MAX_OWNER_LENGTH]\n        with self._database.lock:\n            ours",
            "        with self._database.lock:\n            ours",
        ),
    ),
}
