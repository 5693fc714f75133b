"""A job in which each partition commits by itself, chunk by chunk, once however often the job runs."""
