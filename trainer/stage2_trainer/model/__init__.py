"""The trained model: its weights in memory and on disk, and the libraries that hold them."""
