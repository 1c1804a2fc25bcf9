"""python -m rollplex"""

from rollplex.cli import main

main()
