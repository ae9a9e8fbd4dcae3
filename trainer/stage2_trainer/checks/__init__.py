"""What a run will need, compared with what is there, before anything is loaded."""
