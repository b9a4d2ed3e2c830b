"""The only room that sees planning and runtime: attach, train, verify."""
