"""PostgreSQL: Django's backend, with messages that commit with its transactions."""
