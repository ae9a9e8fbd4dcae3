"""The wire between a learner and its servers, as both ends use it: addresses, requests, answers, buckets, groups."""
