"""The digits data set: real handwritten digits on crops of real photographs, as a COCO file."""
