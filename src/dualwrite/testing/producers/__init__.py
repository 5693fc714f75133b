"""The conformance suite for transactional producers: the contract of `TransactionalProducer`, tested on a real broker.

Provide a producer through a scene, and pytest runs the suite::

    class MyScene(ProducerScene):
        def make(self, kafka_transactional_id, settings):
            return MyProducer({"bootstrap.servers": SERVERS, **settings}, kafka_transactional_id)
        ...  # three more methods: make_topic, read, committed_offset


    class TestMyProducer(ProducerConformance):
        @pytest.fixture
        def scene(self):
            with MyScene(ProducerCapabilities(two_phase=True), coordinator) as scene:
                yield scene

`ProducerCapabilities` declares what only some producers support; tests of a missing capability are skipped. The broker must
have transaction.version 2 and create topics automatically. Optionally, override the fixture `strict_scene` with a scene on a
broker that does not create topics.

The suite breaks no connections: whether a message or an EndTxn whose response was lost takes effect once is not tested. Use
`dualwrite.testing.proxy` in such tests.
"""

from dualwrite.testing.producers.messages import MessageConformance, OffsetConformance, SendManyConformance
from dualwrite.testing.producers.refusals import FencingConformance, RefusalConformance
from dualwrite.testing.producers.scene import ProducerCapabilities, ProducerScene, SeenMessage
from dualwrite.testing.producers.transactions import TransactionConformance


class ProducerConformance(
    MessageConformance,
    SendManyConformance,
    TransactionConformance,
    RefusalConformance,
    OffsetConformance,
    FencingConformance,
):
    """The whole suite; each base class can also be used separately."""


__all__ = [
    "FencingConformance",
    "MessageConformance",
    "OffsetConformance",
    "ProducerCapabilities",
    "ProducerConformance",
    "ProducerScene",
    "RefusalConformance",
    "SeenMessage",
    "SendManyConformance",
    "TransactionConformance",
]
