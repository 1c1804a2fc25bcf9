"""What a GPU offers in place of the host's memory and threads: VMM arenas."""
