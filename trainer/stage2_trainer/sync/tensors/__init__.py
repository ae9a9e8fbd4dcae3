"""What is sent: merged or adapter tensors, their buckets and their digests."""
