"""The native Kafka producer: KIP-939 on the wire. Records and batches are encoded without I/O."""
