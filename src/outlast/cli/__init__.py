"""The command line: one module per command, composed in `outlast.cli.app`."""
