"""`python -m tokenformer VERB …`, and what torchrun starts with `-m tokenformer`."""

import sys

from tokenformer.cli.main import main

sys.exit(main())
