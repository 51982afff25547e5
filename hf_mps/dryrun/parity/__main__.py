"""`python -m hf_mps.dryrun.parity TARGET`: the same command as `hf-mps parity`."""

import sys

from hf_mps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["parity", *sys.argv[1:]], program="python -m hf_mps.dryrun.parity"))
