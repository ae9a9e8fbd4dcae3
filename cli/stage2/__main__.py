"""`python -m stage2`: the stage2 command without a script on PATH."""

from stage2_cli.main import main

main()
