"""Databases that keep the row and take part in the recipe."""
