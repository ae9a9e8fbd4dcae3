"""The error that matching raises. Rollouts never make it raise; broken inputs from the caller do."""


class MatchingError(ValueError):
    """Inputs that contradict one another: a prefix that nothing can follow, prompt ids that differ, wrong lengths."""
