"""The key of a job: by it the queue, the store and all accounts know it."""

from typing import NamedTuple


class Key(NamedTuple):
    """A job's namespace and name: what the queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
