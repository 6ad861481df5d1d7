"""`python -m durable.cli`, the same as `durable-agent`."""

from durable.cli.app import main

if __name__ == "__main__":
    main()
