"""CONFIG [key=value ...]: trains, as a rank of torchrun. Modules of the user's are looked for where the job began."""

import os
import sys

from pipetransformer.launch.entry import main

if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    sys.exit(main())
