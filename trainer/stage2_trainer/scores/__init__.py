"""How good answers are, in the figures that the field knows: from texts and records, without a model or a trainer."""
