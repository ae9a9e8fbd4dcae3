"""The learner's side of a push: which server has what, sending, finishing, proving."""
