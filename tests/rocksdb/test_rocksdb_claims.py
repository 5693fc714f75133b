"""Claims on RocksDB, lane by lane: an opening that another one overtakes."""

from __future__ import annotations

import pytest
from rocksdb_scene import ID

from dualwrite.errors import FencedError
from dualwrite.stores.base import StateRow
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT


@pytest.mark.parametrize("source", ["path"], indirect=True)
def test_an_opening_that_is_overtaken_claims_no_further_lane(store: RocksDBStore, rival: RocksDBStore) -> None:
    lanes = [ID, f"{ID}~1", f"{ID}~2"]
    theirs: list[StateRow] = []

    def overtake() -> None:
        theirs.extend(rival.claim_lanes(lanes, "theirs", timeout=LIMIT, cluster_id="c").rows)

    with (
        failpoints.armed("recover_after_claim", failpoints.only_at(1, overtake)),
        pytest.raises(FencedError),
    ):
        store.claim_lanes(lanes, "ours", timeout=LIMIT, cluster_id="c")
    assert rival.read_claimed_rows([row.claim for row in theirs]) == tuple(theirs)
