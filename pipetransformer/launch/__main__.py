"""``python -m pipetransformer.launch``: see ``launch/node.py``."""

import sys

from pipetransformer.launch.node import main

sys.exit(main())
