"""What a choice costs, in bytes and seconds: pure functions over many plans at once, each with its source. No torch."""
