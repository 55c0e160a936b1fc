"""`python -m roost` is the `roost` command."""

from roost.cli import main

main()
