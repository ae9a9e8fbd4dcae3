"""One pass over a job, decided: from the job and what is observed of it to its status and its children. Pure."""
