"""`python -m inductor_q`: the command line where no script was installed."""

import sys

from inductor_q.cli import main

if __name__ == "__main__":
    sys.exit(main())
