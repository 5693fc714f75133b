"""`dualwrite transactions`: list, describe, examine and end the transactions of a Kafka cluster (KIP-664, KIP-939).

Exit codes: 0 fine, 1 found something, or the answer is not complete, 2 usage error or Kafka can't be reached.
"""

import typer

from dualwrite.cli import transactions_ending, transactions_reading, transactions_repairing

app = typer.Typer(no_args_is_help=True)
for each in (transactions_reading, transactions_repairing, transactions_ending):
    app.registered_commands += each.app.registered_commands
