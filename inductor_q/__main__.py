"""Run the command line by `python -m inductor_q`, where no script was installed."""

import sys

from inductor_q.cli import main

if __name__ == "__main__":
    sys.exit(main())
