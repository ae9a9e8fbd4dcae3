"""The page of `stage2 report --html`: one file, with its pictures, that asks no network for anything."""
