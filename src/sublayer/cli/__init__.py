"""The command line: `main` finds the subcommand; each subcommand is a module with a function `command`."""
