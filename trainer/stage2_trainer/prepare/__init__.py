"""What a person brings, made into what a run takes: annotations into records, stock models into prepared ones."""
