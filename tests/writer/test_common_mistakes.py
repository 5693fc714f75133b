"""Common mistakes end in a few lines: what failed, the cause and the next step, without frames of our own code."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import dualwrite
from dualwrite import DualWriteError, InvalidMessageError
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.messages import checked

NOWHERE = "127.0.0.1:9"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no tables": ({}, "run `dualwrite db upgrade"),
    "a wrong port": (
        {"database": "postgresql://shop@127.0.0.1:9/shop"},
        "check that it is running and that the address is right",
    ),
    "no URL": ({"database": "shop.db"}, "use a URL such as"),
    "a misspelt setting": ({"kafka": {"bootstrap.server": NOWHERE}}, "set bootstrap.servers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("door", ["connect", "create_pool"])
def test_a_mistake_is_told_in_a_few_lines(door: str, mistake: str, broker: DevCluster, tmp_path: Path) -> None:
    changes, step = MISTAKES[mistake]
    arguments = {"database": f"sqlite:///{tmp_path}/shop.db", "kafka": broker.bootstrap_servers, **changes}
    named = {"prefix": "shop"} if door == "create_pool" else {"transactional_id": "shop"}
    with pytest.raises(DualWriteError) as raised:
        getattr(dualwrite, door)(arguments.pop("database"), **arguments, **named)
    shown = "".join(traceback.format_exception(raised.value)).splitlines()
    assert shown[-1].startswith(f"Next step: {step}")
    assert len(shown) < 13, "\n".join(shown)
    if mistake == "a wrong port":
        assert raised.value.__context__ is not None  # the driver's error can still be looked at
    if mistake == "a misspelt setting":
        assert raised.value.cause == "'bootstrap.server' is not a setting; 'bootstrap.servers' is"


def test_an_error_that_does_not_say_what_to_do_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DualWriteError("Something is wrong.")

    monkeypatch.setattr(dualwrite.api, "as_store", fail)
    with pytest.raises(DualWriteError) as raised:
        dualwrite.create_pool("sqlite://", prefix="shop")
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "fail"


def test_a_number_as_a_key_names_what_makes_bytes_of_it() -> None:
    with pytest.raises(InvalidMessageError, match=r"(?s)key must be bytes, str or None, not int.*str\(…\)"):
        checked(("orders", "lamp", 17, None, None, None))
