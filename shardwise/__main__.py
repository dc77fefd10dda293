"""`python -m shardwise`: the command, where its script is not on the path."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
