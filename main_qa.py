"""Entry for question answering: ``python main_qa.py CONFIG [key=value ...]``."""

import sys

from pipetransformer.launch.entry import main

if __name__ == "__main__":
    sys.exit(main("question_answering"))
