"""Many tasks, one commit: what the tasks of a job prepare in Kafka and stage in the database commits as one, or not at all."""
