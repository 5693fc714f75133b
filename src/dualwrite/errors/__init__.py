"""The exception classes. Each error says what failed, for which id, the likely cause, and the next step.

Errors have their facts as attributes and a class attribute `retriable`, and can be pickled, since they cross process
boundaries (Spark, multiprocessing).
"""

from dualwrite.errors.base import DualWriteError
from dualwrite.errors.broker import (
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    ClusterMismatchError,
    DeliveryError,
    MessageRefusedError,
    MessageTooLargeError,
    PrepareError,
    ProducerFencedError,
    RepairRefusedError,
    TransactionChangedError,
    TransactionTimeoutError,
    TransactionTimeoutRefusedError,
    TwoPhaseCommitRefusedError,
    UnknownGroupError,
    UnknownTopicError,
    UnknownTransactionStateError,
)
from dualwrite.errors.consuming import (
    LogTruncatedError,
    MessageFailedError,
    MessagesDeletedError,
    PositionForgottenError,
    TopicReplacedError,
)
from dualwrite.errors.jobs import BatchRefusedError, ChunkChangedError, JobClosedError, JobPlanChangedError
from dualwrite.errors.messages import (
    DeserializationError,
    InvalidMessageError,
    SchemaRegistryUnavailableError,
    SerializationError,
)
from dualwrite.errors.outcomes import (
    AfterCommitError,
    InDoubtTransactionError,
    LostTransactionError,
    RecoveryError,
    UnverifiedTransactionError,
)
from dualwrite.errors.ownership import ClaimTimeoutError, FencedError, PoolTimeoutError, PrefixLeasedError
from dualwrite.errors.store import (
    NotResolvedError,
    PositionMovedError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreCopiedError,
    StoredStateError,
    StoreError,
    StoreLockedError,
    StoreUnavailableError,
)
from dualwrite.errors.usage import (
    ConcurrentUseError,
    ConfigurationError,
    InvalidTransactionalIdError,
    InvalidTransitionError,
    MissingDependencyError,
    NestedTransactionError,
    TransactionControlError,
    UsageError,
    WriterClosedError,
)

__all__ = [
    "AfterCommitError",
    "BatchRefusedError",
    "BrokerAuthorizationError",
    "BrokerError",
    "BrokerUnavailableError",
    "ChunkChangedError",
    "ClaimTimeoutError",
    "ClusterMismatchError",
    "ConcurrentUseError",
    "ConfigurationError",
    "DeliveryError",
    "DeserializationError",
    "DualWriteError",
    "FencedError",
    "InDoubtTransactionError",
    "InvalidMessageError",
    "InvalidTransactionalIdError",
    "InvalidTransitionError",
    "JobClosedError",
    "JobPlanChangedError",
    "LogTruncatedError",
    "LostTransactionError",
    "MessageFailedError",
    "MessageRefusedError",
    "MessageTooLargeError",
    "MessagesDeletedError",
    "MissingDependencyError",
    "NestedTransactionError",
    "NotResolvedError",
    "PoolTimeoutError",
    "PositionForgottenError",
    "PositionMovedError",
    "PrefixLeasedError",
    "PrepareError",
    "ProducerFencedError",
    "RecoveryError",
    "RepairRefusedError",
    "SchemaRegistryUnavailableError",
    "SerializationError",
    "StateTableMissingError",
    "StoreCommitFailedError",
    "StoreCommitUnknownError",
    "StoreCopiedError",
    "StoreError",
    "StoreLockedError",
    "StoreUnavailableError",
    "StoredStateError",
    "TopicReplacedError",
    "TransactionChangedError",
    "TransactionControlError",
    "TransactionTimeoutError",
    "TransactionTimeoutRefusedError",
    "TwoPhaseCommitRefusedError",
    "UnknownGroupError",
    "UnknownTopicError",
    "UnknownTransactionStateError",
    "UnverifiedTransactionError",
    "UsageError",
    "WriterClosedError",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from: for tracebacks and pickles
