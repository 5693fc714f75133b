"""The producer over confluent-kafka (librdkafka): any broker from 3.0 on, without two-phase commit."""
