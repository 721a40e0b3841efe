"""Entry for text classification: ``python main_tc.py CONFIG [key=value ...]``."""

import sys

from pipetransformer.launch.entry import main

if __name__ == "__main__":
    sys.exit(main("text_classification"))
