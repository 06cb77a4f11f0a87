"""``python -m labkit``: the command line where no script was installed."""

import sys

from labkit.cli import main

sys.exit(main())
