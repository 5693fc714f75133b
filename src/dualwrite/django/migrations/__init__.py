"""dualwrite's tables, a migration for each of alembic's revisions."""
