"""The view of `stage2 report --live`: a run in the terminal, as it goes on."""
