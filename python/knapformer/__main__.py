"""`python -m knapformer`: the command."""

import sys

from knapformer.tools.cli import main

sys.exit(main())
