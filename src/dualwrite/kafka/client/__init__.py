"""One client for Kafka: connections, requests, retries and errors, under producers, coordinator and inspection."""
