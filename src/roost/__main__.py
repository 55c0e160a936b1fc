"""`python -m roost` is the `roost` command."""

import sys

try:
    from roost.cli import main

    main()
except KeyboardInterrupt:  # while Python imports the command
    sys.exit(130)
