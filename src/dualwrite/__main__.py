"""`python -m dualwrite` is the command `dualwrite`."""

import sys

from dualwrite.cli import main

sys.exit(main())
