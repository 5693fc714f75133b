"""The command to run next for what needs somebody. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualwrite.cli.options import Given
from dualwrite.cli.output import Record
from dualwrite.diagnosis.needs import NEEDS, Attention, Need, by_need

_OPTIONS: Final[Mapping[Need, tuple[str, ...]]] = {
    Need.PUBLISH: ("--republish",),
    Need.GONE: ("--acknowledge",),
    Need.ACKNOWLEDGE: ("--acknowledge",),
}


def need_record(one: Attention, given: Given) -> Record:
    """The fields of one transaction that needs somebody."""
    names = {"need": one.need, "transactional_id": one.transactional_id, "kafka_transactional_id": one.kafka_id}
    return {**names, "next_command": command_for(one.need, [one], given)}


def verdict_lines(found: list[Attention], given: Given) -> list[str]:
    """One line for each kind of need, with the command to run next; empty if there is none."""
    return [f"{NEEDS[need](len(ones))}: {command_for(need, ones, given)}" for need, ones in by_need(found).items()]


def command_for(need: Need, ones: list[Attention], given: Given) -> str:
    """The command that does what is needed."""
    if need is Need.MARKERS:
        return given.command("transactions", "describe", *dict.fromkeys(each.kafka_id for each in ones))
    ids = [word for name in dict.fromkeys(each.transactional_id for each in ones) for word in ("--id", name)]
    return given.command("recover", *ids, *_OPTIONS.get(need, ()))
