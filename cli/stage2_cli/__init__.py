"""The stage2 command: the only code that may import both the controller and the trainer."""
