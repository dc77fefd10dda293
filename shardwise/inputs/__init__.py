"""What you have and want: frozen values. Recipe (what the user wants), Arch (the model's shape), Cluster."""
