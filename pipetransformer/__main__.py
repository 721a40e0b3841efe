"""``python -m pipetransformer``: the console command."""

import sys

from pipetransformer.commands import main

if __name__ == "__main__":
    sys.exit(main())
