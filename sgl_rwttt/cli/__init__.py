"""The ``sgl-rwttt`` command: one module per subcommand."""
