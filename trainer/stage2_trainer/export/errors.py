"""The error of an export that went wrong: known without a model's libraries."""


class ExportError(RuntimeError):
    """What was written is not what was merged, or does not answer as the learner's model. Nothing is left of it."""
