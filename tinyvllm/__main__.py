"""`python -m tinyvllm` is the `tinyvllm` command."""

import sys

from tinyvllm.cli.main import main

sys.exit(main())
