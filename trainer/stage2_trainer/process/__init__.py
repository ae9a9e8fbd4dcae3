"""One process of a learner: model, arguments, ranks, offload, interruption."""
