"""A page in the browser: whether all is well, what waits and for whom, and what operators do about it.

`app.mount("/dualwrite", console(pool))` mounts it in a Starlette or FastAPI application; `dualwrite console` serves it.
"""

from dualwrite.errors import MissingDependencyError

try:
    from dualwrite.console.access import Authorize, Role, TokenAccess
    from dualwrite.console.app import Console, console
except ImportError as error:
    raise MissingDependencyError(
        "The console needs packages that are not installed.", cause=str(error), next_step='pip install "dualwrite[console]"'
    ) from error

__all__ = ["Authorize", "Console", "Role", "TokenAccess", "console"]
