"""`dualwrite offsets`: the positions of consumer groups in the database: list, reset, forget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Annotated, Final

import typer

from dualwrite.admin import TransactionAdmin
from dualwrite.cli.options import (
    TIMEOUT_SECONDS,
    AsJson,
    JsonGroup,
    Target,
    Yes,
    confirm,
    grouped,
    not_empty,
    refuse,
    store_for,
)
from dualwrite.cli.output import print_json, show_facts, show_table
from dualwrite.diagnosis.positions import POSITIONS, ShownPosition, is_replaced, read_shown, with_kafka
from dualwrite.errors import BrokerError, PositionMovedError
from dualwrite.kafka.inspect import topic_ids
from dualwrite.kafka.librdkafka.group_offsets import IdleGroup
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions
from dualwrite.texts import counted

_EDGES: Final = ("earliest", "latest")
_MAX_ATTEMPTS: Final = 20

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)

Group = Annotated[str, typer.Option("--group", help="The consumer group.")]


def commit_to_kafka(settings: Settings, group: str, stored: Mapping[Partition, Position]) -> None:
    """Set a group's offsets at Kafka to its positions, so that a consumer that uses these offsets continues where it stopped.

    Positions in topics that were deleted, or deleted and created again, are left out. Exits with a usage error if the group
    has members, or an offset that is ahead of its position.

    Raises:
        BrokerError: Kafka does not respond.
    """
    with IdleGroup(settings.kafka, group, TIMEOUT_SECONDS) as idle:
        members = idle.members()
        if members:
            refuse(
                f"The group {group!r} is consuming, with {members} member(s) at Kafka. Stop its processors first; a processor "
                "that died remains a member until its session times out."
            )
        ids = topic_ids(settings.kafka, {topic for topic, _ in stored}, timeout=TIMEOUT_SECONDS)
        places = {key: one.offset for key, one in stored.items() if key[0] in ids and not is_replaced(one, ids)}
        committed = idle.committed(places, TIMEOUT_SECONDS)
        ahead = sorted(key for key, offset in committed.items() if offset > places[key])
        if ahead:
            topic, number = key = ahead[0]
            refuse(
                f"The offset of the group {group!r} at Kafka is ahead of its position on {topic}-{number}: {committed[key]} "
                f"and {places[key]}. A consumer with offsets at Kafka has continued from there, or the position was reset. "
                "--force forgets the positions, and leaves the offsets at Kafka unchanged."
            )
        idle.commit(places)


# --- the commands -----------------------------------------------------------------------------------------------------


@app.command("list")
@grouped
def list_command(
    *,
    group: Annotated[str | None, typer.Option("--group", help="Only this consumer group.", show_default="all")] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="Only groups that start with this prefix.", callback=not_empty)] = "",
    target: Target,
    as_json: AsJson = False,
) -> None:
    """Show the positions in the database; with Kafka's address also how far each partition is written."""
    if group is not None and prefix:
        raise typer.BadParameter("give either a group or a prefix, not both.", param_hint="--prefix")
    settings = target.settings()
    with store_for(settings) as store:
        positions = _positions_of(store)
        groups = [group] if group is not None else positions.groups(prefix)
        found = read_shown(positions, groups)
    failure = None
    if found and "bootstrap.servers" in settings.kafka:
        try:
            found = with_kafka(found, settings)
        except BrokerError as error:
            failure = error
    if as_json:
        print_json("offsets list", {"positions": POSITIONS.records(found), "error": failure})
    else:
        show_facts(POSITIONS, found, empty="No consumer group has positions here.")
    if failure is not None:
        raise failure


@app.command("reset")
@grouped
def reset_command(
    *,
    group: Group,
    topic: Annotated[str, typer.Option("--topic", help="The topic.")],
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="A partition; repeatable.", show_default="all")
    ] = None,
    to: Annotated[str, typer.Option("--to", metavar="earliest|latest|OFFSET", help="The new position.")],
    target: Target,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Move a group's positions in the database, all or none.

    A running consumer can't commit what it began before the move; it continues at the new position. Messages in between are
    processed again, or skipped.
    """
    settings = target.settings()
    if "bootstrap.servers" not in settings.kafka:
        refuse("Kafka's address is needed to check the offsets: use --kafka, or DUALWRITE_KAFKA_BOOTSTRAP_SERVERS.")
    with store_for(settings) as store:
        positions = _positions_of(store)
        stored = positions.read(group)
        moves = [Move(stored.get(one.key), one) for one in _targets(settings, topic, partitions or (), to)]
        if not as_json:
            rows = [(*one.key, None if one.before is None else one.before.offset, one.after.offset) for one in moves]
            show_table(("topic", "partition", "position", "new position"), rows)
        confirm(f"Move {counted(len(moves), 'position')} of the group {group!r}?", yes=yes)
        moves = _reset(positions, group, [one.after for one in moves])
    if as_json:
        print_json("offsets reset", {"positions": POSITIONS.records(ShownPosition(group, one.after) for one in moves)})
    else:
        typer.echo("Moved.")


@app.command("forget")
@grouped
def forget_command(
    *,
    group: Group,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Don't contact Kafka: forget them even if the group is consuming, and leave its offsets unchanged."
        ),
    ] = False,
    target: Target,
    yes: Yes = False,
) -> None:
    """Set the offsets at Kafka of a stopped group to its positions, then remove the positions from the database.

    All of its processors must have stopped. If the group consumes again, it starts at its offsets at Kafka.
    """
    settings = target.settings()
    with store_for(settings) as store:
        positions = _positions_of(store)
        stored = positions.read(group)
        if not stored:
            typer.echo(f"The group {group!r} has no positions.")
            return
        if not force and "bootstrap.servers" not in settings.kafka:
            refuse(
                "Kafka's address is needed to check that the group is not consuming, and to set its offsets at Kafka: use "
                "--kafka, or DUALWRITE_KAFKA_BOOTSTRAP_SERVERS; or --force."
            )
        confirm(f"Forget {counted(len(stored), 'position')} of the group {group!r}?", yes=yes)
        if not force:
            commit_to_kafka(settings, group, stored)
            if positions.read(group) != stored:
                refuse(f"The positions of the group {group!r} are changing: one of its processors is still running.")
        typer.echo(f"Forgot {counted(positions.forget(group), 'position')}.")


def _positions_of(store: TxnStateStore) -> Positions:
    positions = store.positions
    if positions is None:
        refuse(f"{store.description} does not support consumer positions.")
    return positions


def _reset(positions: Positions, group: str, targets: Iterable[Position]) -> list[Move]:
    """Move all positions from where they are now. If the group is consuming, they may change between the read and the write."""
    attempts = count(1)
    while True:
        stored = positions.read(group)
        moves = [Move(stored.get(one.key), one) for one in targets]
        try:
            positions.reset(group, moves)
        except PositionMovedError as error:
            if next(attempts) < _MAX_ATTEMPTS:
                continue
            error.next_step = "stop the group's processors and try again, or reset one partition at a time"
            raise
        return moves


def _targets(settings: Settings, topic: str, partitions: Iterable[int], to: str) -> list[Position]:
    if to not in _EDGES and not (to.isascii() and to.isdecimal()):
        raise typer.BadParameter(f"{to!r} is not earliest, latest or an offset.", param_hint="--to")
    chosen = frozenset(partitions)
    with TransactionAdmin(settings=settings, timeout=TIMEOUT_SECONDS) as admin:
        first = admin.first_offsets(topic, chosen)
        last = {(end.topic, end.partition): end for end in admin.ends([topic], chosen)}
    identity = topic_ids(settings.kafka, [topic], timeout=TIMEOUT_SECONDS).get(topic, "")
    found = []
    for key, least in sorted(first.items()):
        end = last[key]
        if end.problem is not None:
            raise end.problem
        most = end.high_watermark or 0
        offset = {"earliest": least, "latest": end.last_stable_offset or 0}.get(to)
        if offset is None:
            offset = int(to)
            if not least <= offset <= most:
                raise typer.BadParameter(f"{key[0]}-{key[1]} has the offsets {least} to {most}.", param_hint="--to")
        found.append(Position(*key, offset, identity))
    return found
