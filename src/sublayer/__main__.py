"""`python -m sublayer` is the command `sublayer`."""

import sys

from sublayer.cli.main import main

sys.exit(main())
