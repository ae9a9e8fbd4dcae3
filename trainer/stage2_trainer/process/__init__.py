"""One process: what it is doing, its ranks, signals, background threads, and the driver that its libraries need."""
