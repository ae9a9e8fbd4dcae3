"""Data: JSONL records, images, chat messages and their encoding into token ids and pixels."""
