"""What can go wrong with a cluster of one's own."""

from __future__ import annotations

from dualwrite.errors import DualWriteError


class DevClusterError(DualWriteError):
    """A cluster could not be prepared, started, reached or stopped.

    Attributes where they apply: `cluster` (name), `node_id`, `port`, `data_dir`.
    """


class BrokerExitedError(DevClusterError):
    """A broker, or the formatting of its storage, ended by itself instead of becoming ready.

    Attributes: `cluster`, `node_id`, `log_file`, `log_tail` (the last lines of its log).
    """


class SettingsDifferError(DevClusterError):
    """A cluster of this name exists with other settings. Attributes: `cluster`, `differences` (list of sentences)."""
