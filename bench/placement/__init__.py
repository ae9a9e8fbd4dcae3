"""A placeholder pod with the sum of a job's requests, on the real scheduler: does the job get that pod's node?"""
