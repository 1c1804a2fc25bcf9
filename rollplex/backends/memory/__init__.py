"""Arenas, the ledgers that count them, and the pinned pool: what every backend's planned objects lie in."""
