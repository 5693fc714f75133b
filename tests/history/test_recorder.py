"""What the recorder writes, the checker reads: by threads, by forks, by a process that is killed; and files that it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import check_history
import history_recorder
import pytest
from history_file import HistoryError
from history_recorder import Recorder

from fixtures.tables import table

TOOLS = Path(history_recorder.__file__).parent


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def check(folder: Path) -> dict[str, Any]:
    return check_history.check(files(folder))


def counts(found: dict[str, Any]) -> dict[str, int]:
    return {name: anomaly["count"] for name, anomaly in found["anomalies"].items() if anomaly["count"]}


def never(_: BaseException) -> bool:
    return False


def read_both(recorder: Recorder, numbers: list[int]) -> None:
    recorder.final_rows(numbers)
    recorder.final_topic("t", [(0, offset, b"k", str(number).encode()) for offset, number in enumerate(numbers)])
    recorder.close()


def test_threads_of_a_process(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "threads", versions={"kafka": "4.2.0"})

    def call(client: int) -> None:
        for number in range(client * 100, client * 100 + 100):
            with recorder.operation(client, [number], {f"t{client}": [("k", str(number))]}, fails=never):
                pass

    threads = [threading.Thread(target=call, args=(client,)) for client in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.final_rows(range(400))
    for client in range(4):
        recorder.final_topic(f"t{client}", [(0, n, "k", str(n)) for n in range(client * 100, client * 100 + 100)])
    recorder.fault("kill", "a broker")
    recorder.close()
    found = check(tmp_path)
    assert counts(found) == {}
    assert (found["operations"]["ok"], found["clients"], found["faults"]) == (400, 4, {"kill": 1})
    assert found["versions"]["kafka"] == ["4.2.0"]


def test_outcomes_of_a_block(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "blocks")
    for number, error in enumerate([ValueError(), KeyError()]):
        with (
            pytest.raises(type(error)),
            recorder.operation("c", [number], {"t": [("k", str(number))]}, fails=lambda e: isinstance(e, ValueError)),
        ):
            raise error
    read_both(recorder, [1])
    found = check(tmp_path)
    assert counts(found) == {}
    assert found["operations"] == {"unknown": 1, "ok": 0, "fail": 1}


def test_an_attempt_replaces_what_the_one_before_has_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "attempts")
    with recorder.operation("c", fails=never) as number:
        recorder.wrote(number, [1], {"t": [("k", "1")]})
        recorder.wrote(number, [2], {"t": [("k", "2")]}, seen=[])
    read_both(recorder, [2])
    assert counts(check(tmp_path)) == {}


def test_the_child_of_a_fork_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "fork")
    child = os.fork()
    if not child:
        recorder.invoke("child", [1], {"t": [("k", "1")]})
        os._exit(0)
    os.waitpid(child, 0)
    with recorder.operation("parent", [2], {"t": [("k", "2")]}, fails=never):
        pass
    read_both(recorder, [1, 2])
    found = check(tmp_path)
    assert counts(found) == {}
    assert found["operations"] == {"unknown": 1, "ok": 1, "fail": 0}
    assert found["processes"] == {"ended": 1, "killed": 1}


KILLED = """
import sys
from history_recorder import Recorder
recorder, number = Recorder(sys.argv[1], "killed"), 0
while True:
    number += 1
    with recorder.operation("c", [number], {"t": [("k", str(number))]}, fails=lambda _: False):
        print(number, flush=True)
"""


def test_what_a_killed_process_has_written_is_there(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        done = 50 + len(process.stdout.readlines())
    read_both(Recorder(tmp_path, "reader"), list(range(1, done + 1)))
    found = check(tmp_path)
    assert counts(found) == {}
    assert found["operations"]["ok"] >= done - 1


def test_an_incomplete_last_line_is_that_of_a_killed_process(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "torn")
    recorder.invoke("c", [1], {"t": [("k", "1")]})
    (path,) = files(tmp_path)
    with path.open("a") as file:
        file.write('["o",1')
    read_both(Recorder(tmp_path, "reader"), [])
    assert check(tmp_path)["operations"]["unknown"] == 1


HEADER = '{"history":1,"name":"n","pid":1,"boot":"b","clock":0,"versions":{}}'
BEGUN = '["i",1,"c",5,[1],{"t":["k","1"]}]'
READ = '["rows",9,[1]]\n["topic",9,"t",0,[0,"k","1"]]'


@table(
    ("text", "why"),
    [
        (f"{HEADER}\n{BEGUN}\n", "no final read of t, the database's rows"),
        (f"{HEADER}\n{READ}\n{BEGUN.replace(',5,', ',50,')}\n", "from before the end of the last operation"),
        (f"{HEADER}\n{BEGUN}\n{BEGUN}\n{READ}\n", ":3: operation 1 has begun before"),
        (f"{HEADER}\n{BEGUN}\n{BEGUN.replace('1', '2', 1)}\n{READ}\n", ":3: 1 is written twice"),
        (f'{HEADER}\n["o",1,5]\n', ":2: this is not a line of a history"),
        (f'{HEADER}\n{BEGUN}\n["o",1,6]\n["u",1,7]\n', ":4: the operation has ended before"),
        (f'{HEADER}\n["z",1]\n', ":2: there is no kind 'z'"),
        (f"{HEADER}\nnonsense\n", ":2: this is not a line of a history"),
        (f'{HEADER}\n["end",1]\n{BEGUN}\n', "there are lines after the file's end"),
        (f"{BEGUN}\n", "the first line is no header"),
        (HEADER.replace("1,", "2,", 1) + "\n", ":1: the format's version is 2"),
        (f'{HEADER}\n["i",1,"c",5,[],{{}},[["g","t",0,0,4]]]\n', "the position of g in t-0"),
    ],
)
def test_files_that_cannot_be_judged(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(HistoryError, match=why.replace("(", r"\(")):
        check_history.check([path])


def test_clocks_of_two_machines_are_not_compared(tmp_path: Path) -> None:
    for name, boot in (("a", "b"), ("b", "c")):
        (tmp_path / name).write_text(HEADER.replace('"b"', f'"{boot}"') + "\n")
    with pytest.raises(HistoryError, match="clocks of several machines"):
        check(tmp_path)


def test_a_message_with_another_key_is_a_phantom(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{HEADER}\n{BEGUN}\n{READ.replace('k', 'j')}\n")
    assert counts(check(tmp_path)) == {"phantom": 1, "torn": 1}


@pytest.mark.parametrize(("lines", "code"), [(READ, 0), (READ.replace("[1]", "[]"), 1), ('["rows",9,[1]]', 2)])
def test_the_command(
    lines: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{HEADER}\n{BEGUN}\n{lines}\n")
    monkeypatch.setattr(sys, "argv", ["check_history.py", str(path)])
    assert check_history.main() == code
    printed = capsys.readouterr()
    assert ("can't be judged" in printed.err) == (code == 2)
    assert (f"message '1' of t without row 1; {path}:2 (client c, unknown)" in printed.out) == (code == 1)
    monkeypatch.setattr(sys, "argv", ["check_history.py", "--json", str(path)])
    assert check_history.main() == code
    if code < 2:
        assert json.loads(capsys.readouterr().out)["anomalies"]["time travel"]["count"] == code
