"""`python -m tinyvllm` is the `tinyvllm` command."""

import sys

from tinyvllm.cli import main

sys.exit(main())
