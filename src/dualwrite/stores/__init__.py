"""The databases that keep the rows and take part in the recipe."""
