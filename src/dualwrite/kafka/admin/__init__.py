"""Requests for the administration of transactions (KIP-664), to all brokers that it takes."""
