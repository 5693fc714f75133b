"""What a DataFrame becomes: rows of a table and Kafka messages, from Arrow record batches."""
