"""`python -m kvferry` is the command `kvferry`."""

from kvferry.cli.main import main

main()
