"""The rules between keys: of a training YAML, of one that runs alone, of a GRPO run, of a job."""
