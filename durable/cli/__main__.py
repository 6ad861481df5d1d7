"""`python -m durable.cli`, the same as `durable-agent`."""

from durable.cli import main

if __name__ == "__main__":
    main()
