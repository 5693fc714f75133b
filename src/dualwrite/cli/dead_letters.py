"""`dualwrite dead-letters`: the messages that a processor could not process: list, show, replay."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from dualwrite.cli.options import AsJson, Given, JsonGroup, Kafka, KafkaSettings, Yes, confirm, grouped, refuse
from dualwrite.cli.output import print_json, print_records, say, show_facts
from dualwrite.diagnosis.facts import Fact, Facts
from dualwrite.processor.dead_letter_topic import DeadLetterTopic
from dualwrite.processor.dead_letters import DeadLetter
from dualwrite.texts import counted

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)

Group = Annotated[
    str | None, typer.Option("--group", help="The consumer group that could not process them.", show_default="the only one")
]
Letters = Annotated[list[str] | None, typer.Option("--letter", metavar="PARTITION:OFFSET", help="A dead letter; repeatable.")]
Waiting = Annotated[bool, typer.Option("--waiting", help="Only those that were not replayed.")]
To = Annotated[
    str | None, typer.Option("--to", metavar="TOPIC", help="Send them to this topic.", show_default="where they came from")
]


@dataclass(frozen=True, kw_only=True)
class Dead(Given):
    """The options that say which dead-letter topic is meant."""

    topic: Annotated[str, typer.Option("--topic", help="The dead-letter topic.")]
    kafka: Kafka = None
    kafka_config: KafkaSettings = None

    def open(self) -> DeadLetterTopic:
        """The topic."""
        return DeadLetterTopic(self.topic, self.settings().kafka)


def _sent_at(letter: DeadLetter) -> datetime | None:
    return None if letter.timestamp is None else datetime.fromtimestamp(letter.timestamp / 1000, UTC)


_LETTER: Final = Facts(
    Fact("letter", "letter", "name"),
    Fact("group", "group"),
    Fact("topic", "topic"),
    Fact("partition", "partition", "source_partition"),
    Fact("offset", "offset", "source_offset"),
    Fact("sent_at", value=_sent_at),
    Fact("attempts", "attempts"),
    Fact("error", "error"),
    Fact("message"),
    Fact("replayed", "replayed", "is_replayed"),
    columns=("letter", "group", "topic", "partition", "offset", "error", "attempts", "replayed"),
)
_CONTENT: Final = Facts(
    Fact("key", value=lambda letter: _text(letter.key)),
    Fact("value", value=lambda letter: _text(letter.value)),
    Fact("headers", value=lambda letter: {name: _text(content) for name, content in letter.headers}),
)


@app.command("list")
@grouped
def list_(*, dead: Dead, group: Group = None, waiting: Waiting = False, as_json: AsJson = False) -> None:
    """List the messages of a dead-letter topic, with where they came from and why."""
    found = [each for each in dead.open().letters(group) if not (waiting and each.is_replayed)]
    if as_json:
        print_json("dead-letters list", {"letters": _LETTER.records(found)})
    else:
        show_facts(_LETTER, found, empty=f"There are no dead letters in {dead.topic}.")


@app.command()
@grouped
def show(*, dead: Dead, letters: Letters = None, as_json: AsJson = False) -> None:
    """Show dead letters with their errors, keys, values and headers."""
    wanted = letters or refuse("Which? Use --letter.")
    found = {each.name: each for each in dead.open().letters()}
    missing = [name for name in wanted if name not in found]
    if missing:
        refuse(f"{dead.topic} has no dead letter {', '.join(missing)}.")
    records = [{**_LETTER.record(found[name]), **_CONTENT.record(found[name])} for name in wanted]
    print_records("dead-letters show", "letters", records, as_json=as_json)


@app.command()
@grouped
def replay(*, dead: Dead, group: Group = None, to: To = None, yes: Yes = False) -> None:
    """Send the dead letters of a group again, each once, after what made them fail is mended.

    Those that were replayed before are left out. Processors of other groups skip the messages; other consumers of the topic see
    them a second time.
    """
    topic = dead.open()
    waiting = [each for each in topic.letters(group) if not each.is_replayed]
    groups = {each.group for each in waiting}
    if len(groups) > 1:
        refuse(f"There are dead letters of several groups: {', '.join(sorted(groups))}. Use --group.")
    if not waiting:
        say("There is nothing to replay.")
        return
    where = to or ", ".join(sorted({each.topic for each in waiting}))
    confirm(f"Send {counted(len(waiting), 'message')} to {where} again, for the group {waiting[0].group}?", yes=yes)
    say(f"Replayed {counted(topic.replay(waiting[0].group, to=to), 'dead letter')}.")


def _text(content: bytes | None) -> str | None:
    """What a terminal can show of it: text, or else Python's form of the bytes."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return repr(content)
