"""Recovery: resolves what a crash left in doubt, by what the database decided."""
