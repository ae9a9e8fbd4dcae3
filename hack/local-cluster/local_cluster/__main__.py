"""`python -m local_cluster`: the command line."""

from local_cluster.cli import app

app()
