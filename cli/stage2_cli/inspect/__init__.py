"""`stage2 inspect`: the E-step of one sample under the magnifying glass, for people, for machines and as a picture."""
