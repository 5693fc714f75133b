"""Fixtures of the Spark tests: scenes in this process, drivers in others, and examples."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driven_scene import DrivenScene
from spark_scene import SparkScene

import dualwrite.spark
from dualwrite.devcluster import DevCluster
from fixtures.spark import FAILPOINTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def make_scene(
    spark: SparkSession, spark_place: Path, tmp_path: Path
) -> Iterator[Callable[[str, DevCluster, str], SparkScene]]:
    """Creates a job on a database and a cluster."""
    dualwrite.spark.register(spark)
    made: list[SparkScene] = []

    def make(url: str, cluster: DevCluster, name: str) -> SparkScene:
        made.append(SparkScene(spark, url, cluster.bootstrap_servers, name, tmp_path, spark_place / FAILPOINTS))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.fixture
def scene(
    make_scene: Callable[[str, DevCluster, str], SparkScene],
    postgres_url: str,
    broker: DevCluster,
    new_name: Callable[[str], str],
) -> SparkScene:
    """A job on PostgreSQL."""
    return make_scene(postgres_url, broker, new_name("spark"))


@pytest.fixture
def driven(
    postgres_url: str, broker: DevCluster, new_name: Callable[[str], str], tmp_path: Path, spark_environment: dict[str, str]
) -> Iterator[DrivenScene]:
    """A job whose driver is a separate process."""
    scene = DrivenScene(postgres_url, broker.bootstrap_servers, new_name("spark"), tmp_path, spark_environment)
    yield scene
    scene.close()


@pytest.fixture
def run_example(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example's script in this process, with the shared session, and environment variables, which its workers have too;
    returns what it says.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(type(spark), "stop", lambda session: None)  # noqa: ARG005  (other tests go on with it)

    def run_example(example: str, *arguments: str | Path, **environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
            monkeypatch.setitem(spark.sparkContext.environment, name, value)
        monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return capsys.readouterr().out

    return run_example
