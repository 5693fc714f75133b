"""Requests for the administration of transactions (KIP-664), to every broker that is involved."""
