"""The Kafka client that producers, coordinator and inspection share: connections, requests, retries and errors."""
