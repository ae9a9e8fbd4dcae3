"""Weight sync: what is sent to the rollout servers, how, and when."""
