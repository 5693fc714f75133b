"""Tools for operators (KIP-664, KIP-939): list the transactions of a cluster, show what waits for them, and end one.

They need only Kafka, no database.
"""

from dualwrite.admin.ending import Examined
from dualwrite.admin.facts import (
    ActiveProducer,
    Answer,
    BrokerProblem,
    DescribedTransaction,
    OpenTransaction,
    PartitionProducers,
    TransactionListing,
)
from dualwrite.admin.hanging import HangingSearch, HangingTransaction, Holder, Reason
from dualwrite.admin.partitions import PartitionEnd
from dualwrite.admin.record_transaction import Ending, RecordTransaction
from dualwrite.admin.transactions import TransactionAdmin
from dualwrite.admin.waiting import StoredPositions, StuckPartition, StuckSearch, WaitingGroup

__all__ = [
    "ActiveProducer",
    "Answer",
    "BrokerProblem",
    "DescribedTransaction",
    "Ending",
    "Examined",
    "HangingSearch",
    "HangingTransaction",
    "Holder",
    "OpenTransaction",
    "PartitionEnd",
    "PartitionProducers",
    "Reason",
    "RecordTransaction",
    "StoredPositions",
    "StuckPartition",
    "StuckSearch",
    "TransactionAdmin",
    "TransactionListing",
    "WaitingGroup",
]
