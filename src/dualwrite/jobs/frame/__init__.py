"""Converts a DataFrame's Arrow record batches to rows of a table and to Kafka messages."""
