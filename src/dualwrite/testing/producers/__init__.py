"""The conformance suite of transactional producers: what the Protocol `TransactionalProducer` promises, on a real broker.

Give it a producer by a scene, and pytest runs it::

    class MyScene(ProducerScene):
        def make(self, kafka_transactional_id, settings):
            return MyProducer({"bootstrap.servers": SERVERS, **settings}, kafka_transactional_id)
        ...  # three more methods: make_topic, read, committed_offset


    class TestMyProducer(ProducerConformance):
        @pytest.fixture
        def scene(self):
            with MyScene(ProducerCapabilities(two_phase=True), coordinator) as scene:
                yield scene

What only some producers can do is told by `ProducerCapabilities`; tests of it are skipped for the others. The broker must
have transaction.version 2 and make topics at first use; `strict_scene` may be given as well, on one that makes none.
"""

from dualwrite.testing.producers.fencing import FencingConformance
from dualwrite.testing.producers.many import ManyConformance
from dualwrite.testing.producers.messages import MessageConformance
from dualwrite.testing.producers.offsets import OffsetConformance
from dualwrite.testing.producers.refusals import RefusalConformance
from dualwrite.testing.producers.scene import ProducerCapabilities, ProducerScene, SeenMessage
from dualwrite.testing.producers.transactions import TransactionConformance


class ProducerConformance(
    MessageConformance,
    ManyConformance,
    TransactionConformance,
    RefusalConformance,
    OffsetConformance,
    FencingConformance,
):
    """All of it; each of its parts may be used by itself, too."""


__all__ = [
    "FencingConformance",
    "ManyConformance",
    "MessageConformance",
    "OffsetConformance",
    "ProducerCapabilities",
    "ProducerConformance",
    "ProducerScene",
    "RefusalConformance",
    "SeenMessage",
    "TransactionConformance",
]
