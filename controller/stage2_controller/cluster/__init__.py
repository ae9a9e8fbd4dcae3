"""The cluster: requests to the API server, what its watches have told, and the account of its nodes."""
