"""The findings about PostgreSQL: whether it keeps acknowledged commits, also if a standby is promoted. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from dualwrite.diagnosis.findings import CRASH, LOST_COMMIT, Finding, Severity, about_database

_WEAK_VALUES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("synchronous_commit", "off"): (f"{CRASH} {LOST_COMMIT}", "synchronous_commit=on"),
    ("fsync", "off"): ("a power failure may lose acknowledged commits, and corrupt the whole database", "fsync=on"),
    ("full_page_writes", "off"): ("a power failure may corrupt committed pages", "full_page_writes=on"),
}
"""By setting and value, what may happen, and the better value."""

_WAITS: Final = ("on", "remote_apply", "remote_write", "local", "off")
_STANDBYS: Final = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\((.*)\)\s*", re.IGNORECASE)


def judge_postgresql(settings: Mapping[str, str]) -> list[Finding]:
    """The findings about the settings of `SqlStateStore.durability`."""
    if settings.get("transaction_read_only") == "on":
        what = "The database is read-only (transaction_read_only): a standby, or a read-only user."
        return [about_database(Severity.BROKEN, what, "connect to the primary, as a user that may write")]
    found = []
    if settings.get("persistence") == "u":
        what = (
            "The table kafka_transaction_state is UNLOGGED: after a crash of the server it is empty, and so is every record of "
        )
        what += "what was committed."
        found.append(about_database(Severity.BROKEN, what, "ALTER TABLE kafka_transaction_state SET LOGGED"))
    found += [
        about_database(Severity.WEAK, f"{name} is {value}: {consequence}.", change)
        for (name, value), (consequence, change) in _WEAK_VALUES.items()
        if settings.get(name) == value
    ]
    if "product" in settings:
        what = (
            f"This is {settings['product']}: where an acknowledged commit is stored, and what a failover keeps, is not decided "
        )
        what += "by PostgreSQL's settings."
        return [*found, about_database(Severity.UNKNOWN, what, "the provider's documentation of durability and failover")]
    return found if settings["synchronous_commit"] == "off" else [*found, *_standbys(settings)]


def _standbys(settings: Mapping[str, str]) -> list[Finding]:
    names, waits = settings.get("synchronous_standby_names"), settings["synchronous_commit"]
    attached = int(settings["attached standbys"]) if "attached standbys" in settings else None
    if names is None or waits not in _WAITS:
        what = f"synchronous_standby_names is {names}, synchronous_commit is {waits}: whether a commit waits for a standby is "
        return [about_database(Severity.UNKNOWN, f"{what}not known.", "PostgreSQL's documentation of both settings")]
    if not names:
        return [_waits_for_none(attached)]
    if waits == "local":
        what = f"synchronous_commit is local: promoting a standby {LOST_COMMIT}."
        return [about_database(Severity.WEAK, what, "synchronous_commit=on")]
    if waits == "remote_write":
        what = (
            "synchronous_commit is remote_write: a commit waits until a standby has it in memory. If that machine fails too, "
        )
        return [about_database(Severity.WEAK, f"{what}promoting it {LOST_COMMIT}.", "synchronous_commit=on")]
    return _synchronous(settings, names, attached)


def _waits_for_none(attached: int | None) -> Finding:
    if attached:
        what = f"A commit does not wait for an attached standby ({attached}): one that is promoted may lack the last commits."
        return about_database(Severity.WEAK, what, "synchronous_standby_names, with the standbys that may be promoted")
    what = "A commit waits for no standby: one that is promoted after a failure may lack the last commits."
    if attached == 0:
        what += " None is attached at present."
    return about_database(Severity.NOTE, what, "set synchronous_standby_names, if there are standbys")


def _synchronous(settings: Mapping[str, str], names: str, attached: int | None) -> list[Finding]:
    listed = _STANDBYS.fullmatch(names)
    wanted = int(listed[1]) if listed else 1
    members = (listed[2] if listed else names).split(",")
    there = settings.get("synchronous standbys")
    if there is not None and int(there) < wanted:
        what = f"A commit waits for {wanted} of {names!r}, and {there} of them are attached: every COMMIT hangs now."
        return [about_database(Severity.BROKEN, what, "start the standbys, or change synchronous_standby_names")]
    everyone = len(members) if attached is None else max(len(members), attached)
    if everyone <= wanted and "*" not in names:
        return []
    what = f"A commit waits for {wanted} of the standbys {names!r}. If another one is promoted, it may lack the last commits."
    step = "whether your failover tool promotes only a standby that has every acknowledged commit (Patroni: synchronous_mode)"
    return [about_database(Severity.UNKNOWN, what, step)]
