"""The learner: E-step, M-step, evaluation, and the loop around them."""
