"""`dualwrite transactions`: list, describe, examine and end the transactions of a Kafka cluster (KIP-664, KIP-939).

With --json a command that fails prints an error document (`json_documents`).

Exit codes: 0 no problem was found, 1 something was found, or the output is incomplete, 2 usage error, or Kafka can't be
reached.
"""

import typer

from dualwrite.cli import transactions_ending, transactions_reading
from dualwrite.cli import transactions_ending as transactions_repairing
from dualwrite.cli.tool_options import ToolGroup

app = typer.Typer(
    cls=ToolGroup,
    no_args_is_help=True,
    epilog="As with kafka-transactions.sh, options may precede the command.",
)
for each in (transactions_reading, transactions_repairing, transactions_ending):
    app.registered_commands += each.app.registered_commands
