"""What uses confluent-kafka (librdkafka): a producer without two-phase commit for any broker from 3.0 on, consumers, topics."""
