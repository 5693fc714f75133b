"""dualwrite's own Kafka producer: KIP-939 on the wire. One room for each idea; records and batches are encoded without I/O."""
