"""What a training rank does, whichever engine runs its model."""
