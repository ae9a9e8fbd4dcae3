"""A checkpoint's weights as a model folder, or as an adapter, that others load without stage2."""
