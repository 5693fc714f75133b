"""dualwrite: write to a database and to Kafka atomically, without an outbox relay (KIP-939)."""

import os as _os

from dualwrite.assembly import connect, open_recoverer
from dualwrite.errors import (
    BatchRefusedError,
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    ClaimTimeoutError,
    ClusterMismatchError,
    ConcurrentUseError,
    ConfigurationError,
    DeliveryError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    InvalidMessageError,
    InvalidTransactionalIdError,
    InvalidTransitionError,
    JobClosedError,
    LostTransactionError,
    MessageRefusedError,
    MessageTooLargeError,
    MissingDependencyError,
    NestedTransactionError,
    NotSettledError,
    PrefixLeasedError,
    PrepareError,
    ProducerFencedError,
    RecoveryError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreCopiedError,
    StoredStateError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
    TransactionTimeoutError,
    TransactionTimeoutRefusedError,
    TwoPhaseCommitRefusedError,
    UnknownTopicError,
    UnknownTransactionStateError,
    UnverifiedTransactionError,
    UsageError,
    WriterClosedError,
)
from dualwrite.jobs.recovering import plan_recovery, recover
from dualwrite.lifecycle import Phase
from dualwrite.plan import GenerationPlan, IdPlan, RecoveryPlan
from dualwrite.recovery import Recoverer
from dualwrite.report import GenerationOutcome, IdReport, Outcome, RecoveryReport
from dualwrite.settings import Settings
from dualwrite.state import PreparedTxnState
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.timeouts import Timeouts
from dualwrite.transaction import Transaction
from dualwrite.writer import DualWriter

__version__ = "0.1.0"

__all__ = [
    "BatchRefusedError",
    "BrokerAuthorizationError",
    "BrokerError",
    "BrokerUnavailableError",
    "ClaimTimeoutError",
    "ClusterMismatchError",
    "ConcurrentUseError",
    "ConfigurationError",
    "DeliveryError",
    "DualWriteError",
    "DualWriter",
    "FencedError",
    "GenerationOutcome",
    "GenerationPlan",
    "IdPlan",
    "IdReport",
    "InDoubtTransactionError",
    "InvalidMessageError",
    "InvalidTransactionalIdError",
    "InvalidTransitionError",
    "JobClosedError",
    "LostTransactionError",
    "MessageRefusedError",
    "MessageTooLargeError",
    "MissingDependencyError",
    "NestedTransactionError",
    "NotSettledError",
    "Outcome",
    "Phase",
    "PrefixLeasedError",
    "PrepareError",
    "PreparedTxnState",
    "ProducerFencedError",
    "Recoverer",
    "RecoveryError",
    "RecoveryPlan",
    "RecoveryReport",
    "Settings",
    "SqlStateStore",
    "StateTableMissingError",
    "StoreCommitFailedError",
    "StoreCommitUnknownError",
    "StoreCopiedError",
    "StoreError",
    "StoreUnavailableError",
    "StoredStateError",
    "Timeouts",
    "Transaction",
    "TransactionControlError",
    "TransactionTimeoutError",
    "TransactionTimeoutRefusedError",
    "TwoPhaseCommitRefusedError",
    "UnknownTopicError",
    "UnknownTransactionStateError",
    "UnverifiedTransactionError",
    "UsageError",
    "WriterClosedError",
    "connect",
    "open_recoverer",
    "plan_recovery",
    "recover",
    "store_from_url",
]

if _os.environ.get("DUALWRITE_TESTING") == "1" and _os.environ.get("DUALWRITE_FAILPOINTS"):
    from dualwrite.testing.failpoints import arm_from_environment as _arm

    _arm()
