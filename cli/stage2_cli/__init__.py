"""The stage2 command: the only code that may import both the controller and the trainer."""

from stage2_api.pod.first_process import end_at_sigterm

end_at_sigterm()  # before anything else is imported, which may take seconds
