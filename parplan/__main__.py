"""`python -m parplan` is the command `parplan`."""

import sys

from parplan.cli.main import main

sys.exit(main())
