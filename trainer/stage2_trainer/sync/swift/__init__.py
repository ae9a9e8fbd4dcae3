"""ms-swift's protocol of weight sync."""
