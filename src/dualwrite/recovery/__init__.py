"""Recovery: resolves the transactions that a crash left in doubt, according to what the database decided."""
