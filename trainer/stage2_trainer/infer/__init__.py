"""Pictures in, boxes out: a trained model answers an image that belongs to no data set."""
