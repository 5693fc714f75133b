"""A third-party store: it uses the suite in ten lines, is found by its entry point, and is refused with a clear error.

And no broken variant of that store passes the suite.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from mutants import MUTANTS

from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.stores.registry import ENTRY_POINT_GROUP, store_from_url
from fixtures.pace import LIMIT

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_store"
SOURCE = (EXAMPLE / "in_memory.py").read_text(encoding="utf-8")


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    environ.pop("PYTEST_ADDOPTS", None)
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=4 * LIMIT, check=False)


def suite(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example's test file, in a separate folder, on a store with this source."""
    (folder / "in_memory.py").write_text(source, encoding="utf-8")
    for name in ("test_own_store.py", "pyproject.toml"):
        (folder / name).write_bytes((EXAMPLE / name).read_bytes())
    return run("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--timeout", "60", *options, folder=folder)


# --- the suite --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_passes_the_suite(tmp_path: Path) -> None:
    done = suite(tmp_path, SOURCE)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 80
    for missing in ("corrupt", "opener", "open_with_short_timeout", "ways_to_end", "cut_next_commit", "turn_clock_back"):
        assert f"this scene has no `{missing}`" in done.stdout


def broken(mutant: str) -> str:
    """The source of a broken variant."""
    source = SOURCE
    for before, after in MUTANTS[mutant]:
        assert before in source, f"the example has changed: {before!r} is not in it"
        source = source.replace(before, after)
    compile(source, "in_memory.py", "exec")
    return source


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, list[tuple[str, str]]]]:
    """The suite's result for each mutant of this run: pytest's exit code, and the failures with the types of their errors."""
    folder = tmp_path_factory.mktemp("mutants")
    found = (getattr(item, "callspec", None) for item in request.session.items)
    mutants = {each.params["mutant"] for each in found if each is not None and "mutant" in each.params} & set(MUTANTS)
    (folder / "mutants.json").write_text(json.dumps({mutant: broken(mutant) for mutant in mutants}), encoding="utf-8")
    for name in ("test_own_store.py", "pyproject.toml"):
        (folder / name).write_bytes((EXAMPLE / name).read_bytes())
    runner = str(Path(__file__).with_name("mutant_runner.py"))
    done = run("-W", "ignore", runner, str(folder), folder=folder, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # each start loads them
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[int, list[tuple[str, str]]]] = json.loads(done.stdout)
    return results


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS)  # the suite changes seldom
def test_no_broken_store_passes_the_suite(verdicts: dict[str, tuple[int, list[tuple[str, str]]]], mutant: str) -> None:
    """It fails in a test, and not because the variant is not valid Python."""
    code, failures = verdicts[mutant]
    assert code == pytest.ExitCode.TESTS_FAILED
    ((test, kinds),) = failures
    assert test.endswith(", call")
    assert {"AssertionError", "Failed", "DualWriteError"} & set(kinds.split()), failures


@pytest.mark.soak
def test_a_failure_shows_the_contract_and_what_the_store_did(tmp_path: Path) -> None:
    done = suite(
        tmp_path,
        broken("commit does not check the fence"),
        "-x",
        "-k",
        "test_a_claim_during_a_transaction and recorded",
    )
    assert done.returncode == 1
    assert "the contract requires FencedError; the store raised nothing" in done.stdout
    assert "A claim waits for the transaction, or makes it fail" in done.stdout
    done = suite(
        tmp_path,
        broken("a conditional claim resets transaction_number"),
        "-x",
        "-k",
        "test_a_conditional_claim_keeps_the_transaction_number",
    )
    assert "transaction_number is 0, the contract requires 7" in done.stdout


def test_the_code_in_the_readme_is_the_code_that_runs() -> None:
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(shown) == 3
    texts = [(EXAMPLE / name).read_text(encoding="utf-8") for name in ("test_own_store.py", "pyproject.toml")]
    for block in shown:
        assert any(block in text for text in texts), block


# --- entry points -----------------------------------------------------------------------------------------------------


def distribution(folder: Path, name: str, entries: dict[str, str], modules: dict[str, str]) -> None:
    """An installed package, as pip would create it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = "".join(f"{scheme} = {value}\n" for scheme, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{points}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.slow
def test_an_installed_package_is_found_by_its_scheme_and_loaded_lazily(tmp_path: Path) -> None:
    """Installed by pip from a wheel, with the entry points of the example's own pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((group, entries),) = project["entry-points"].items()
    assert group == ENTRY_POINT_GROUP
    wheel, installed = tmp_path / "own_store-1.0-py3-none-any.whl", tmp_path / "installed"
    files = {
        "in_memory.py": SOURCE,
        "own_store-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n",
        "own_store-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "own_store-1.0.dist-info/entry_points.txt": f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()),
    }
    record = "".join(f"{name},,\n" for name in [*files, "own_store-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, "own_store-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(installed))
    done = run(*pip, str(wheel), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    program = (
        "import sys\n"
        "from dualwrite.stores.registry import store_from_url\n"
        "store_from_url('sqlite:////nowhere/x.db')\n"
        "assert 'in_memory' not in sys.modules\n"
        "with store_from_url('memory://x') as store, store_from_url('MEMORY+any://x') as same:\n"
        "    print(store.description, store.claim('id', 'me', timeout=1).fence, same.claim('id', 'me', timeout=1).fence)\n"
    )
    done = run("-c", program, folder=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "memory://x 1 2\n"
    done = run("-m", "dualwrite.cli", "status", "--url", "memory://x", folder=tmp_path, PYTHONPATH=str(installed))
    assert "Traceback" not in done.stderr, done.stderr


def test_a_broken_package_does_not_affect_other_stores(packages: Path) -> None:
    distribution(packages, "broken", {"broken": "broken_store:make"}, {"broken_store": "raise RuntimeError('broken')\n"})
    with store_from_url("sqlite:////nowhere/x.db") as store:
        assert "broken_store" not in sys.modules
        assert "sqlite" in store.description


def test_an_unknown_scheme_is_refused_with_the_known_ones(packages: Path) -> None:
    distribution(packages, "one", {"memory": "nowhere:make", "zebra": "nowhere:make"}, {})
    with pytest.raises(ConfigurationError, match="'oracle'") as caught:
        store_from_url("oracle://me:s3cret@db/x")
    for listed in ("postgresql+psycopg://", "sqlite:///", "rocksdb:///", "zookeeper://", "memory://…, zebra://…"):
        assert listed in caught.value.next_step
    assert "s3cret" not in str(caught.value)


def test_two_packages_for_one_scheme(packages: Path) -> None:
    distribution(packages, "one", {"memory": "first:make"}, {})
    distribution(packages, "two", {"memory": "second:make"}, {})
    with pytest.raises(ConfigurationError, match="More than one") as caught:
        store_from_url("memory://me:s3cret@x")
    assert "first:make of the package one" in str(caught.value)
    assert "second:make of the package two" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_built_in_schemes_cannot_be_replaced(packages: Path) -> None:
    distribution(packages, "taker", {"sqlite": "taker:make"}, {"taker": "raise RuntimeError('taken')\n"})
    store_from_url("sqlite:////nowhere/x.db").close()


def test_objects_that_are_not_stores_are_refused(packages: Path) -> None:
    distribution(packages, "nostore", {"dict": "nostore:make"}, {"nostore": "def make(url):\n    return {}\n"})
    with pytest.raises(ConfigurationError, match="returned a dict for dict://, not a TxnStateStore") as caught:
        store_from_url("dict://me:s3cret@x")
    assert "nostore:make of the package nostore" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("lacking_store:make", "No module named"),
        ("not_there:make", "No module named"),
        ("whole_store:mkae", "no attribute 'mkae'"),
    ],
)
def test_a_missing_dependency_of_a_package_is_named(packages: Path, value: str, cause: str) -> None:
    modules = {"lacking_store": "import its_driver_that_is_missing\n", "whole_store": ""}
    distribution(packages, "lacking", {"lacking": value}, modules)
    with pytest.raises(MissingDependencyError) as caught:
        store_from_url("lacking://me:s3cret@x")
    assert f"{value} of the package lacking" in str(caught.value)
    assert cause in caught.value.cause
    assert "reinstall" in caught.value.next_step
    assert "s3cret" not in str(caught.value)


def test_an_error_of_the_store_is_not_hidden(packages: Path) -> None:
    text = "def make(url):\n    raise ConnectionRefusedError('no')\n"
    distribution(packages, "failing", {"failing": "failing_store:make"}, {"failing_store": text})
    with pytest.raises(ConnectionRefusedError):
        store_from_url("failing://x")
