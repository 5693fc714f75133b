"""Tools for an operator (KIP-664, KIP-939): what transactions there are in a cluster, who holds them, and which ones hang.

They need Kafka only, no database.
"""

from dualwrite.admin.hanging import HangingSearch, HangingTransaction, OpenTransaction, Reason
from dualwrite.admin.transactions import TransactionAdmin
from dualwrite.kafka.admin.facts import (
    ActiveProducer,
    Answer,
    BrokerProblem,
    DescribedTransaction,
    PartitionProducers,
    TransactionListing,
)

__all__ = [
    "ActiveProducer",
    "Answer",
    "BrokerProblem",
    "DescribedTransaction",
    "HangingSearch",
    "HangingTransaction",
    "OpenTransaction",
    "PartitionProducers",
    "Reason",
    "TransactionAdmin",
    "TransactionListing",
]
