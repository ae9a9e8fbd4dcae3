"""Transfers of weights to one server: a protocol, and an implementation for each transport."""
