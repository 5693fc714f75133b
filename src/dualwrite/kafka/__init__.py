"""Kafka's side of the recipe: producers, coordinator, configuration."""

from dualwrite.kafka.capabilities import PROBE_ID, BrokerCapabilities, TwoPhaseObstacle, probe

__all__ = ["PROBE_ID", "BrokerCapabilities", "TwoPhaseObstacle", "probe"]
