"""Tools for an operator (KIP-664, KIP-939): what transactions there are in a cluster, who holds them, and which ones hang.

They need Kafka only, no database.
"""

from dualwrite.admin.transactions import TransactionAdmin
from dualwrite.kafka.admin.facts import (
    Answer,
    BrokerProblem,
    DescribedTransaction,
    TransactionListing,
)

__all__ = [
    "Answer",
    "BrokerProblem",
    "DescribedTransaction",
    "TransactionAdmin",
    "TransactionListing",
]
