"""What a job asks for: its document, the administrator's policy, containers, names, credentials."""
