"""What a person reads: the plan page, tables, and the verdict; made of the IR alone, without an engine or a solver."""
