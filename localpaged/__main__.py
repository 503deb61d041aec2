"""`python -m localpaged` is the same as `localpaged`."""

from localpaged.cli import main

main()
