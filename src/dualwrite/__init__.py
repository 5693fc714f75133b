"""dualwrite: write to a database and to Kafka atomically, without an outbox relay (KIP-939)."""
