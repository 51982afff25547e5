"""`python -m hf_mps.dryrun.memory TARGET`: the same command as `hf-mps plan`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]], program="python -m hf_mps.dryrun.memory"))
