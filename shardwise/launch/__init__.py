"""Start it somewhere: rendering is pure, starting is thin. The run folder stands here too."""
