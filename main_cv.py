"""Entry for image classification: ``python main_cv.py CONFIG [key=value ...]``."""

import sys

from pipetransformer.launch.entry import main

if __name__ == "__main__":
    sys.exit(main("image_classification"))
