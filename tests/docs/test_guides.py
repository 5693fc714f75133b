"""The guides have every option of Spark's data source and every failpoint, as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dualwrite import failpoints
from fixtures.tables import table

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def test_the_options_of_spark_are_those_of_its_docstring() -> None:
    """`dualwrite.spark` is where they are written; the guide has them as they stand there."""
    pytest.importorskip("pyspark")
    import dualwrite.spark  # noqa: PLC0415
    from dualwrite.spark.source_options import OPTIONS  # noqa: PLC0415

    table = [line for line in (dualwrite.spark.__doc__ or "").splitlines() if line.startswith("| ")]
    assert "\n".join(table) in (GUIDES / "spark-rules.md").read_text(encoding="utf-8")
    told = re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in table))
    assert set(OPTIONS) <= set(told)


@table("point", failpoints.NAMES)
def test_every_failpoint_is_documented(point: str) -> None:
    assert f"`{point}`" in (GUIDES / "failpoints.md").read_text(encoding="utf-8")
