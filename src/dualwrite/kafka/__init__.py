"""Kafka's side of the recipe: producers, coordinator, configuration."""
