"""Many tasks, one commit: what a job's tasks prepare in Kafka and stage in the database is committed together or not at all."""
