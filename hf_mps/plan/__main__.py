"""`python -m hf_mps.plan TARGET`: the same command as `hf-mps plan`."""

import sys

from hf_mps.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]], program="python -m hf_mps.plan"))
