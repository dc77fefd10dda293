"""Shardwise beside other people's training loops and formats."""
