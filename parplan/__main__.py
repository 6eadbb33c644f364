"""`python -m parplan` is the command `parplan`."""

import sys

from parplan.cli import main

sys.exit(main())
