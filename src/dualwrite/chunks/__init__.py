"""Jobs whose partitions commit independently, chunk by chunk; each chunk is committed once, however often the job runs."""
