"""The errors of the development cluster."""

from __future__ import annotations

from dualwrite.errors import DualWriteError


class DevClusterError(DualWriteError):
    """A cluster could not be prepared, started, reached or stopped.

    Attributes, if they apply: `cluster` (name), `node_id`, `port`, `data_dir`.
    """


class BrokerExitedError(DevClusterError):
    """A broker exited instead of becoming ready, or the formatting of its storage failed.

    Attributes: `cluster`, `node_id`, `log_file`, `log_tail` (the last lines of its log).
    """


class SettingsDifferError(DevClusterError):
    """A cluster of this name exists with other settings. Attributes: `cluster`, `differences` (list of sentences)."""
