"""The producers guide names the defaults that the code has, where they differ from librdkafka's and where they don't."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

import dualwrite
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka import librdkafka_producer as librdkafka
from dualwrite.kafka.native.native_settings import KNOWN_NAMES, MAX_IN_FLIGHT, NativeSettings
from fixtures.tables import table

GUIDE: Final = (Path(__file__).parents[2] / "docs" / "guides" / "producers.md").read_text(encoding="utf-8")
TABLE: Final = GUIDE.split("These defaults differ from librdkafka's")[1].split("\n\n")[1]
ROWS: Final = {
    name: row for row in TABLE.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1]) if row.strip()
}
"""The rows by the settings that they name."""
CONFIG: Final = KafkaConfig.of("localhost:9092")
NATIVE: Final = NativeSettings.of(CONFIG)


def ours(setting: str) -> str:
    """What the table says that dualwrite has."""
    return ROWS[setting].split("|")[3]


@table(
    ("setting", "value"),
    [
        ("client.id", f"`{CONFIG.client_id}`"),
        ("socket.timeout.ms", f"{CONFIG.socket_timeout:g} s"),
        ("socket.connection.setup.timeout.ms", f"{CONFIG.connect_timeout:g} s"),
        ("socket.keepalive.enable", "on" if CONFIG.keepalive else "off"),
        ("max.in.flight.requests.per.connection", str(MAX_IN_FLIGHT)),
        ("queue.buffering.max.kbytes", f"{NATIVE.buffer_bytes // 2**20} MiB"),
        ("message.timeout.ms", f"{dualwrite.Timeouts().for_delivery:g} s"),
    ],
)
def test_defaults_of_the_native_producer_are_those_in_the_table(setting: str, value: str) -> None:
    assert value in ours(setting)


@pytest.mark.parametrize("setting", ["queue.buffering.max.messages", "socket.nagle.disable", "linger.ms"])
def test_settings_ignored_by_the_native_producer_are_marked(setting: str) -> None:
    assert setting not in KNOWN_NAMES
    assert "not read" in ours(setting)


def test_settings_for_librdkafka_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(librdkafka, "Producer", given.update)
    librdkafka.check_settings(CONFIG)
    assert given.keys() - {"bootstrap.servers", "transactional.id", "logger", "throttle_cb"} <= ROWS.keys()
    assert f" {given['linger.ms']};" in ours("linger.ms")
    assert given["client.id"] in ours("client.id")
    assert given["socket.keepalive.enable"] is CONFIG.keepalive


@table(
    "shown",
    [
        f"`batch.size` ({NATIVE.batch_bytes // 10**6} MB)",
        f"`message.max.bytes` ({NATIVE.message_max_bytes // 10**6} MB)",
        f"`request.timeout.ms` ({NATIVE.request_timeout:g} s)",
        f"`retry.backoff.ms` ({NATIVE.retry_backoff * 1000:g} ms)",
        f"`retry.backoff.max.ms` ({NATIVE.retry_backoff_max:g} s)",
        f"`topic.metadata.refresh.interval.ms` ({NATIVE.metadata_max_age / 60:g} min)",
    ],
)
def test_defaults_of_librdkafka_are_named(shown: str) -> None:
    assert shown in " ".join(GUIDE.split())
