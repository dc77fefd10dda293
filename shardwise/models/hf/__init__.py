"""Models of Hugging Face: where they lie, how they are built without memory, and how their weights come onto ranks."""
