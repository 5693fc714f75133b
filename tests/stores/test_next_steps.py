"""Next steps that contain an id: commands that a shell runs as they are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import cast

import pytest

from dualwrite.errors import NotResolvedError
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.migration import upgrade
from dualwrite.recovery.clusters import move_to_cluster
from dualwrite.state import ProducerKind
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT


class OtherCluster:
    """A coordinator of which only the cluster's id is asked."""

    def cluster_id(self, *, timeout: float | None = None) -> str:
        del timeout
        return "new"


def test_an_id_with_a_space_is_quoted_where_moving_it_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    upgrade(url)
    with SqlStateStore.from_url(url) as store:
        claim = store.claim("shop 1", "tests", timeout=LIMIT)
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="old")
        with pytest.raises(NotResolvedError) as refused:
            move_to_cluster(store, cast("TransactionCoordinator", OtherCluster()), ["shop 1"], timeout=LIMIT)
    assert refused.value.next_step is not None
    command = refused.value.next_step.split("`")[1]
    assert shlex.split(command) == ["dualwrite", "recover", "--id", "shop 1"]
