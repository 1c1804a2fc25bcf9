"""The rules of a plan, one idea a file; `rollplex.ir.checker` asks them all."""
